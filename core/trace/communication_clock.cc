#include "core/trace/communication_clock.h"

#include <algorithm>

namespace sirtaki::core::trace {

CommunicationClock::Times CommunicationClock::Read(TimePoint now) const {
  MutexLock lock(mutex_);
  return At(now);
}

void CommunicationClock::Change(TimePoint now, const Counts& change) {
  MutexLock lock(mutex_);
  times_ = At(now);
  last_ = std::max(last_, now);
  under_way_.calls += change.calls;
  under_way_.transfers += change.transfers;
  under_way_.waits += change.waits;
}

CommunicationClock::Times CommunicationClock::At(TimePoint now) const {
  Times times = times_;
  const Duration since = std::max(now, last_) - last_;
  const bool transfers = under_way_.transfers > 0;
  if (transfers) times.transfer += since;
  if (under_way_.waits > 0) {
    times.wait += since;
    if (transfers) {
      times.exposed += since;
    } else if (under_way_.calls > 0) {
      times.agreement += since;
    }
  }
  return times;
}

}  // namespace sirtaki::core::trace
