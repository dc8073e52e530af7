// A peer watch asks now and then, while work is outstanding, whether the processes of other ranks have
// ended: who does not come any more rings nobody.
#pragma once

#include <chrono>
#include <functional>
#include <utility>

#include "core/base/status.h"
#include "core/base/types.h"

namespace sirtaki::core {

class PeerWatch {
 public:
  // `check`: an error that names the rank if it is known that the process of one has ended. Null:
  // nobody is asked.
  explicit PeerWatch(std::function<Status()> check) : check_(std::move(check)) {}

  // When the next look is due while anything is outstanding.
  TimePoint next() const { return check_ ? next_ : TimePoint::max(); }

  // Looks if that is due. An end counts at the second look that finds it: what the rank has said
  // before, and what others say about it, says more and may still be on its way.
  Status Look(TimePoint now) {
    next_ = now + kInterval;
    Status lost = check_();
    const bool was_lost = std::exchange(is_lost_, !lost.ok());
    return was_lost ? lost : Status::Ok();
  }
  // Nothing is outstanding at a time when a look is due.
  void Skip(TimePoint now) { next_ = now + kInterval; }

 private:
  // The waits of a step are shorter.
  static constexpr Duration kInterval = std::chrono::milliseconds(100);

  const std::function<Status()> check_;
  TimePoint next_{};
  bool is_lost_ = false;
};

}  // namespace sirtaki::core
