#include "core/trace/step_clock.h"

#include <algorithm>

namespace sirtaki::core::trace {
namespace {

TimePoint At(Duration::rep count) { return TimePoint(Duration(count)); }

}  // namespace

void StepClock::NoteFirst() {
  Duration::rep none = 0;
  first_gradient_.compare_exchange_strong(none, Clock::now().time_since_epoch().count(),
                                          std::memory_order_relaxed);
}

void StepClock::BeginStep() {
  const Duration::rep first = first_gradient_.load(std::memory_order_relaxed);
  if (first != 0) observer_->metrics.Add(Metric::kBackwardTime, Clock::now() - At(first));
}

void StepClock::EndStep() {
  const TimePoint now = Clock::now();
  const Duration::rep first = first_gradient_.exchange(0, std::memory_order_relaxed);
  const Duration::rep last =
      last_end_.exchange(now.time_since_epoch().count(), std::memory_order_relaxed);
  observer_->metrics.Add(Metric::kSteps);
  if (last != 0) observer_->metrics.Add(Metric::kStepTime, now - At(last));
  Event event;
  event.kind = EventKind::kStep;
  event.thread = ThisThreadNumber();
  event.number = static_cast<std::uint64_t>(++steps_);
  event.begin = first != 0 ? At(std::max(first, last)) : now;
  event.end = now;
  observer_->recorder.Add(event);
}

}  // namespace sirtaki::core::trace
