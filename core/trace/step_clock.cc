#include "core/trace/step_clock.h"

#include <algorithm>
#include <chrono>

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
  const Duration::rep first = first_gradient_.exchange(0, std::memory_order_relaxed);
  Event event;
  event.kind = EventKind::kStep;
  event.thread = ThisThreadNumber();
  MutexLock lock(mutex_);
  const TimePoint now = Clock::now();
  Metrics total = observer_->metrics.Read();
  Metrics step = total - at_last_end_;
  const auto add = [&](Metric id, std::int64_t count) {
    observer_->metrics.Add(id, count);
    total.counts[static_cast<std::size_t>(id)] += count;
    step.counts[static_cast<std::size_t>(id)] += count;
  };
  add(Metric::kSteps, 1);
  if (steps_ > 0) {
    add(Metric::kTimedSteps, 1);
    add(Metric::kStepTime, std::chrono::nanoseconds(now - last_end_).count());
    add(Metric::kStepWaitTime, step.Count(Metric::kWaitTime));
    add(Metric::kStepTransferTime, step.Count(Metric::kTransferTime));
    add(Metric::kStepExposedTime, step.Count(Metric::kExposedTime));
    add(Metric::kStepAgreementTime, step.Count(Metric::kAgreementTime));
    last_step_ = step;
  }
  event.number = static_cast<std::uint64_t>(++steps_);
  event.begin = first != 0 ? std::max(At(first), last_end_) : now;
  event.end = now;
  last_end_ = now;
  at_last_end_ = total;
  observer_->recorder.Add(event);
}

std::uint64_t StepClock::Number() const {
  MutexLock lock(mutex_);
  return static_cast<std::uint64_t>(steps_) + 1;
}

Metrics StepClock::LastStep() const {
  MutexLock lock(mutex_);
  return last_step_;
}

}  // namespace sirtaki::core::trace
