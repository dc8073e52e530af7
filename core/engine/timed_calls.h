// TimedCalls holds the calls with a time-out of their own, from when the engine has taken them until
// their handles are done. Pure.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <utility>

#include "core/base/types.h"
#include "core/engine/work.h"
#include "core/protocol/request.h"

namespace sirtaki::core {

struct TimedCall {
  Key key;
  Duration limit{};
  HandlePtr handle;
  bool asked = false;  // who misses it
};

class TimedCalls {
 public:
  void Add(TimePoint deadline, TimedCall call) {
    if (calls_.size() >= sweep_at_) {
      std::erase_if(calls_, [](const auto& known) { return known.second.handle->done(); });
      sweep_at_ = 2 * calls_.size() + kSweepAtLeast;
    }
    calls_.emplace(deadline, std::move(call));
  }
  // Takes the next call that is late at `now`; none: no other is.
  std::optional<TimedCall> TakeLate(TimePoint now) {
    while (!calls_.empty()) {
      const auto first = calls_.begin();
      const bool done = first->second.handle->done();
      if (!done && first->first > now) break;
      TimedCall call = std::move(first->second);
      calls_.erase(first);
      if (!done) return call;
    }
    return {};
  }
  TimePoint earliest() const { return calls_.empty() ? TimePoint::max() : calls_.begin()->first; }
  void Clear() { calls_.clear(); }

 private:
  static constexpr std::size_t kSweepAtLeast = 64;

  std::multimap<TimePoint, TimedCall> calls_;  // by deadline
  std::size_t sweep_at_ = kSweepAtLeast;
};

}  // namespace sirtaki::core
