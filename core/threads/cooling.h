// How long a poller may sleep when nothing rings for it: the longer nothing has moved, the longer.
// Pure.
//
// A timed sleep costs about 30 us of CPU, so a sleep of 5 % of the quiet time adds at most 5 % to a
// latency, and the bounds keep the cost of a quiet wait at about 3 % of a core and of idling under
// 1 %.
#pragma once

#include <algorithm>

#include "core/base/types.h"

namespace sirtaki::core {

class Cooling {
 public:
  struct Limits {
    Duration min{};
    Duration max_outstanding{};  // while this rank waits for something
    Duration max_idle{};
  };

  Cooling(Limits limits, TimePoint now) : limits_(limits), last_traffic_(now) {}

  void Traffic(TimePoint now) { last_traffic_ = now; }
  // Whether something moved within the last `hot`.
  bool Hot(TimePoint now, Duration hot) const { return now - last_traffic_ < hot; }

  TimePoint NextPoll(TimePoint now, bool outstanding) const {
    const Duration max = outstanding ? limits_.max_outstanding : limits_.max_idle;
    return now + std::clamp((now - last_traffic_) / 20, std::min(limits_.min, max), max);
  }

 private:
  Limits limits_;
  TimePoint last_traffic_;
};

}  // namespace sirtaki::core
