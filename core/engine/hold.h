// A hold leaves new work that nobody waits for where it is for a while, so that what is submitted in a
// row is negotiated together. Pure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "core/base/types.h"

namespace sirtaki::core {

class Hold {
 public:
  // Work is held until none has come for `delay`, but at most for kFactor times that. Zero: never.
  static constexpr int kFactor = 10;

  // True if new work is held at `now`, when there are `works` of it.
  bool Holds(std::size_t works, Duration delay, TimePoint now) {
    if (delay <= Duration::zero()) return false;
    if (!held_) held_ = Held{now, now, works, {}};
    if (std::exchange(held_->works, works) != works) held_->last = now;
    held_->until = std::min(held_->last + delay, held_->since + kFactor * delay);
    return now < held_->until;
  }
  void Release() { held_.reset(); }
  // Work is held until then; none is held if this is none.
  std::optional<TimePoint> until() const {
    return held_ ? std::optional(held_->until) : std::nullopt;
  }

 private:
  struct Held {
    TimePoint since{};
    TimePoint last{};  // when more was seen
    std::size_t works = 0;
    TimePoint until{};
  };
  std::optional<Held> held_;
};

}  // namespace sirtaki::core
