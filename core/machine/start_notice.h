// What the process around a rank hears of the rank's start: that it goes into MPI_Init, and that it
// has come out. So a start that hangs there is ended by sirtakirun, which the rank itself cannot.
//
// Each notice is a datagram of one byte to a local socket with an abstract name, which stands in a
// variable. Who does not hear it misses nothing but the deadline.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/base/environment.h"

namespace sirtaki::core {

inline constexpr std::string_view kStartNoticeVariable = "SIRTAKIRUN_START";

enum class StartNotice : std::uint8_t { kBegins = 'b', kIsThrough = 't' };

// Nothing if nobody wants to hear it; does not fail.
void TellStart(const EnvironmentView& env, StartNotice notice);

// Where the notices come in, not blocking; `*name` is for the variable. -1: there can be none. The
// caller closes it.
int ListenForStart(std::string* name);

}  // namespace sirtaki::core
