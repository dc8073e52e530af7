// The one error value of the library: a code, a text, and where it began.
//
// Inside the library nothing throws across a module boundary: functions return Status (or fill
// one), and only frameworks/ turns a Status into an exception. A Status is a value: copying it
// allocates nothing, and it may cross threads. Moved from, it is ok.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace sirtaki::core {

enum class StatusCode : std::uint8_t {
  kOk = 0,
  kInvalidArgument,  // what this rank passed is wrong whatever the others do
  kMismatch,         // the ranks asked for different things under one name
  kNotInitialized,   // called before init() or after shutdown()
  kDuplicateName,    // the name is in flight on this rank
  kShutDown,         // a rank that had to take part has left
  kPeerLost,         // a rank does not answer, or its connection failed
  kTimedOut,         // a wait passed its limit
  kAborted,          // a program called abort(reason)
  kBackend,          // MPI, NCCL or CUDA reported a failure
  kProtocol,         // a message that no correct peer sends
  kUnsupported,      // known, but not in this build or version
  kRefused,  // a rank gives nothing, since its program has thrown; to programs kInvalidArgument
};
inline constexpr StatusCode kLastStatusCode = StatusCode::kRefused;

// "invalid argument", "mismatch", …: for texts and logs.
std::string_view StatusCodeName(StatusCode code);

// Where an error began. Unset fields are -1 or empty.
struct Origin {
  int rank = -1;
  std::string host;
  std::string tensor;  // the name as it was given (see TensorName in message.h)
  bool operator==(const Origin&) const = default;
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message, Origin origin = {});

  static Status Ok() { return {}; }

  bool ok() const { return code() == StatusCode::kOk; }
  StatusCode code() const { return said_ == nullptr ? StatusCode::kOk : said_->code; }
  const std::string& message() const { return Said().message; }
  const Origin& origin() const { return Said().origin; }

  // "mismatch: all-reduce \"w\": … (from rank 3 on host b)". Never empty, "ok" when ok. Of the
  // origin what the message does not say itself.
  std::string ToString() const;

  bool operator==(const Status& other) const {
    return said_ == other.said_ || Said() == other.Said();
  }

 private:
  struct All {
    StatusCode code = StatusCode::kOk;
    std::string message;
    Origin origin;
    bool operator==(const All&) const = default;
  };
  const All& Said() const;

  std::shared_ptr<const All> said_;  // null: ok, which most are
};

// The exception that a handler has caught, as a status of kBackend: its text, or "out of host memory".
Status StatusOfException();

// What a call returns, or the status of what it throws.
template <typename Call>
Status OrThrown(const Call& call) {
  try {
    return call();
  } catch (...) {
    return StatusOfException();
  }
}

// The first failure by rank, as every rank shall see it: it names the rank unless all say the same.
Status FirstFailure(std::span<const Status> by_rank);

}  // namespace sirtaki::core
