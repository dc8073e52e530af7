// A peer watch asks now and then, while somebody waits, whether the processes of other ranks have
// ended: who does not come any more rings nobody.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>

#include "core/base/status.h"
#include "core/base/types.h"

namespace sirtaki::core {

class PeerWatch {
 public:
  // `check`: an error that names the rank if it is known that the process of one has ended. Null:
  // nobody is asked. `patience`: for how long an end is known before it counts; what the rank has said
  // before, and what others say about it, says more and may still be on its way.
  explicit PeerWatch(std::function<Status()> check, Duration patience = kInterval)
      : check_(std::move(check)), patience_(patience) {}

  // When the next look is due while anything is outstanding.
  TimePoint next() const { return check_ ? next_ : TimePoint::max(); }

  // Looks if that is due.
  Status Look(TimePoint now) {
    if (now < next()) return Status::Ok();
    next_ = now + kInterval;
    Status lost = check_();
    lost_since_ = lost.ok() ? TimePoint::max() : std::min(lost_since_, now);
    return now - lost_since_ >= patience_ ? lost : Status::Ok();
  }
  // Nothing is outstanding at a time when a look is due.
  void Skip(TimePoint now) { next_ = now + kInterval; }

 private:
  // The waits of a step are shorter.
  static constexpr Duration kInterval = std::chrono::milliseconds(100);

  const std::function<Status()> check_;
  const Duration patience_;
  TimePoint next_{};
  TimePoint lost_since_ = TimePoint::max();
};

}  // namespace sirtaki::core
