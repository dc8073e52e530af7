// A loss is the end of a connection that nobody has announced, or its silence: the process of the other
// rank has ended or has begun again, or its host or the way to it is gone.
#pragma once

#include <cerrno>
#include <chrono>
#include <string>

#include "core/base/status.h"
#include "core/base/types.h"

namespace sirtaki::tcp {

// What the others have to say about it, as that a program has thrown, may come a little later, by
// another way, and says more. So a loss counts only after this time.
inline constexpr auto kGrace = std::chrono::milliseconds(100);

// Whether errno says that a call which does not block may be made again.
inline bool IsForLater(int error) { return error == EAGAIN || error == EINTR; }

class Loss {
 public:
  // The first one stays.
  void Note(core::Status why);
  // `error`: errno; 0 or EPIPE where the connection was closed.
  void Note(int rank, const std::string& host, int error);
  bool noted() const { return counts_at_ != core::TimePoint::max(); }
  // kPeerLost, once it counts.
  core::Status status() const {
    return noted() && core::Clock::now() >= counts_at_ ? status_ : core::Status::Ok();
  }

 private:
  core::TimePoint counts_at_ = core::TimePoint::max();
  core::Status status_;
};

}  // namespace sirtaki::tcp
