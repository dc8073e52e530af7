// The process around a rank hears notices from the rank. Its start: that it goes into MPI_Init, and
// that it has come out, so that sirtakirun ends a start that hangs there, which the rank itself
// cannot. And its group's fault, which sirtakirun names as the cause of what happens next.
//
// Each notice is a datagram, a byte and a text, to a local socket with an abstract name, which
// stands in a variable. Whoever does not hear it misses only the deadline and the cause. Every user
// of the host may send there, so what others' processes say is passed over.
//
// In an elastic job both talk to each other in this way: see core/machine/elastic_notice.h.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/environment.h"

namespace sirtaki::core {

inline constexpr std::string_view kStartNoticeVariable = "SIRTAKIRUN_START";

enum class StartNotice : std::uint8_t {
  kBegins = 'b',
  kIsThrough = 't',
  kFault = 'f',    // with its text: the group has failed
  kAgain = 'a',    // a session has begun: an earlier fault is over
  kElastic = 'e',  // an ElasticNotice
};
// How the text of the group's fault goes on after "aborted: " where a rank's program has exited.
inline constexpr std::string_view kProgramExited = "the program exited";
inline constexpr std::size_t kMaxNoticeText = 2000;  // what is longer is cut

// Nothing if nobody wants to hear it; does not fail. kFault never blocks, the others at most 1 s.
void TellStart(const EnvironmentView& env, StartNotice notice, std::string_view text = {});

// Where the notices come in, not blocking; `*name` is for the variable. -1: there can be none. The
// caller closes it.
int ListenForStart(std::string* name);

struct HeardNotice {
  StartNotice notice;
  std::string text;
  std::string from;   // the name of the sender's socket; empty: it has none
  pid_t process = 0;  // the sender's; 0: this process does not see it
};
// The notices that wait at ListenForStart()'s `fd`, of this user's processes alone. Takes at most
// `most` datagrams, so that a flood of them cannot keep the caller.
std::vector<HeardNotice> HearStart(int fd, int most);

// Sends a notice from ListenForStart()'s `fd` to the socket of that name, and does not block. False: it
// could not be sent, with errno: EAGAIN where there is no room for it now.
bool SendNotice(int fd, std::string_view to, StartNotice notice, std::string_view text);

}  // namespace sirtaki::core
