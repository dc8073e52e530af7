// Whether somebody has been in one call for too long, by the looks that others take now and then.
// Pure.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "core/base/types.h"

namespace sirtaki::core {

class StuckWatch {
 public:
  explicit StuckWatch(Duration limit) : limit_(limit) {}

  // `calls`: how many calls have begun or ended, so it is odd within one. True once a single call
  // has lasted for the limit. Time in which nobody looked counts for little: the process may have
  // been stopped.
  bool Look(std::uint64_t calls, TimePoint now) {
    if (calls != calls_ || calls % 2 == 0) {
      calls_ = calls;
      lasted_ = Duration::zero();
    } else {
      lasted_ += std::min<Duration>(now - last_, kMostOfALook);
    }
    last_ = now;
    return lasted_ >= limit_ && lasted_ > Duration::zero();
  }

 private:
  static constexpr Duration kMostOfALook = std::chrono::milliseconds(200);

  const Duration limit_;
  std::uint64_t calls_ = 0;
  TimePoint last_{};
  Duration lasted_{};
};

}  // namespace sirtaki::core
