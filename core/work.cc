#include "core/work.h"

#include <utility>

namespace sirtaki::core {

HandleState::HandleState(std::function<void()> on_complete, std::function<void()> on_observed)
    : on_complete_(std::move(on_complete)), on_observed_(std::move(on_observed)) {}

// Nobody can see the end any more, so the name must not stay taken.
HandleState::~HandleState() { Observe(); }

bool HandleState::Complete(Status status) {
  {
    MutexLock lock(mutex_);
    if (done_.load(std::memory_order_relaxed)) return false;
    status_ = std::move(status);
    done_.store(true, std::memory_order_release);
  }
  // A read-modify-write, not a load: either it sees the waiter's increment, or that increment reads
  // from it and then the waiter sees done_. With a plain load both could miss each other.
  if (waiters_.fetch_add(0, std::memory_order_seq_cst) > 0 && on_complete_) on_complete_();
  return true;
}

void HandleState::Observe() {
  if (!observed_.exchange(true, std::memory_order_acq_rel) && on_observed_) on_observed_();
}

}  // namespace sirtaki::core
