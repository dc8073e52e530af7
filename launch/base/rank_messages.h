// A rank's sirtakirun and the user's tell each other messages. Pure.
//
//   frame   := length (4 bytes, lowest first), then as many bytes: a message
//   message := 0 rank size local_rank host port        hello: the rank is there
//            | 1 stream bytes                          what it has printed
//            | 2 kind value text told                  its program has ended
//            | 3 address port devices                  go: rank 0's address, the GPUs to be seen
//            | 4                                       stop; of a rank: it is about to
//            | 5 count                                 bytes of its output that were written
//            | 6 through                               it goes into MPI_Init, or has come out
//            | 7 text                                  its group has failed; empty: that is over
//            | 8 challenge                             of a rank (see greeting.h)
//            | 9 challenge proof                       answer of sirtakirun
//            | 10 proof                                of the rank
//            | 11                                      welcome: it knows the key
//            | 12 signal                               for the rank's program
//            | 13 notice                               of an elastic job, for the program or of it
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "core/base/status.h"

namespace sirtaki::launch {

inline constexpr int kMaxRanks = 1 << 20;  // of a job, by its options too

enum class Stream : std::uint8_t { kOutput, kError };
inline constexpr std::array<Stream, 2> kStreams = {Stream::kOutput, Stream::kError};

struct HelloMessage {
  int rank = 0;
  int size = 0;
  int local_rank = 0;
  std::string host;
  int port = 0;  // a free one of its host
  bool operator==(const HelloMessage&) const = default;
};

struct OutputMessage {
  Stream stream{};
  std::string bytes;
  bool operator==(const OutputMessage&) const = default;
};

enum class EndKind : std::uint8_t { kExited, kSignalled, kNotStarted };

struct EndMessage {
  EndKind kind{};
  int value = 0;      // the exit code, the signal, or errno
  std::string text;   // why it was not started
  bool told = false;  // a signal to the rank came before: it ended because others had
  bool operator==(const EndMessage&) const = default;
};

struct GoMessage {
  std::string master_address;
  int master_port = 0;
  std::string devices;  // "0,2"; empty: all
  bool operator==(const GoMessage&) const = default;
};

struct StopMessage {
  bool operator==(const StopMessage&) const = default;
};

struct WrittenMessage {
  std::size_t bytes = 0;
  bool operator==(const WrittenMessage&) const = default;
};

struct InitMessage {
  bool through = false;
  bool operator==(const InitMessage&) const = default;
};

struct FaultMessage {
  std::string text;  // of the group's fault; empty: the program has begun again
  bool operator==(const FaultMessage&) const = default;
};

struct ChallengeMessage {
  std::string challenge;
  bool operator==(const ChallengeMessage&) const = default;
};

struct AnswerMessage {
  std::string challenge;
  std::string proof;
  bool operator==(const AnswerMessage&) const = default;
};

struct ProofMessage {
  std::string proof;
  bool operator==(const ProofMessage&) const = default;
};

struct WelcomeMessage {
  bool operator==(const WelcomeMessage&) const = default;
};

struct SignalMessage {
  int signal = 0;
  bool operator==(const SignalMessage&) const = default;
};

struct ElasticMessage {
  std::string notice;  // core/machine/elastic_notice.h
  bool operator==(const ElasticMessage&) const = default;
};

using RankMessage =
    std::variant<HelloMessage, OutputMessage, EndMessage, GoMessage, StopMessage, WrittenMessage,
                 InitMessage, FaultMessage, ChallengeMessage, AnswerMessage, ProofMessage,
                 WelcomeMessage, SignalMessage, ElasticMessage>;

inline constexpr std::size_t kMaxOutputBytes = std::size_t{16} * 1024;  // of one message
// A rank sends no more output than this before it hears that it was written. It is less than the
// 64 KiB that a system takes in without being read: so a connection stands still only when the
// other host is gone, not when sirtakirun is held up.
inline constexpr std::size_t kMaxUnwritten = 3 * kMaxOutputBytes;

// The frame of a message.
std::string Encode(RankMessage message);

inline constexpr std::size_t kMaxMessage = std::size_t{1024} * 1024;
inline constexpr std::size_t kMaxGreeting = 256;  // bytes of a message before both ends are known

// Takes messages out of bytes as they come.
class MessageReader {
 public:
  // A message has at most that many bytes.
  explicit MessageReader(std::size_t most = kMaxMessage) : most_(most) {}
  void Allow(std::size_t most) { most_ = most; }
  void Append(std::string_view bytes) { bytes_.append(bytes); }
  // The next whole message, if there is one. kProtocol if that is none that a correct peer sends;
  // then so is every later one.
  core::Status Next(std::optional<RankMessage>* out);

 private:
  std::size_t most_;
  std::string bytes_;
  core::Status broken_;
};

}  // namespace sirtaki::launch
