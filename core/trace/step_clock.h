// The steps of a rank's optimizers: when the first gradient of each came, when step() began and
// when it was over.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/base/thread_annotations.h"
#include "core/trace/observer.h"

namespace sirtaki::core::trace {

// Thread-safe: gradients come on other threads than steps. Steps of several optimizers are counted
// as they come.
class StepClock {
 public:
  explicit StepClock(ObserverPtr observer) : observer_(std::move(observer)) {}

  // Costs a load, except for the first gradient of a step.
  void NoteGradient() {
    if (first_gradient_.load(std::memory_order_relaxed) == 0) NoteFirst();
  }
  void BeginStep();
  void EndStep() SIRTAKI_EXCLUDES(mutex_);
  // The number of the step that is not over, from 1.
  std::uint64_t Number() const SIRTAKI_EXCLUDES(mutex_);
  // The metrics of the last step alone, from the end of the one before it to its own; all zero
  // before two have ended.
  Metrics LastStep() const SIRTAKI_EXCLUDES(mutex_);

 private:
  void NoteFirst();

  const ObserverPtr observer_;
  std::atomic<Duration::rep> first_gradient_{0};  // since the step before; 0: none yet
  mutable Mutex mutex_;
  std::int64_t steps_ SIRTAKI_GUARDED_BY(mutex_) = 0;
  TimePoint last_end_ SIRTAKI_GUARDED_BY(mutex_){};
  Metrics at_last_end_ SIRTAKI_GUARDED_BY(mutex_);
  Metrics last_step_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::core::trace
