// The steps of a rank's optimizers: when the first gradient of each came, when step() began and
// when it was over.
#pragma once

#include <atomic>

#include "core/trace/observer.h"

namespace sirtaki::core::trace {

// Thread-safe: gradients come on other threads than steps. Steps of several optimizers are counted
// as they come.
class StepClock {
 public:
  explicit StepClock(ObserverPtr observer) : observer_(std::move(observer)) {}

  // Costs a load but for the first gradient of a step.
  void NoteGradient() {
    if (first_gradient_.load(std::memory_order_relaxed) == 0) NoteFirst();
  }
  void BeginStep();
  void EndStep();

 private:
  void NoteFirst();

  const ObserverPtr observer_;
  std::atomic<Duration::rep> first_gradient_{0};  // since the step before; 0: none yet
  std::atomic<Duration::rep> last_end_{0};        // 0: there was no step yet
  std::atomic<std::int64_t> steps_{0};
};

}  // namespace sirtaki::core::trace
