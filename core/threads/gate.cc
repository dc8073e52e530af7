#include "core/threads/gate.h"

namespace sirtaki::core {

bool Gate::TryLock(const char* what) {
  if (taken_.exchange(true)) return false;
  what_.store(what, std::memory_order_relaxed);
  owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  return true;
}

// A thread counts as one that waits before it looks, and the gate is free before the thread that
// leaves looks for those: one of the two sees the other.
bool Gate::LockUntil(const char* what, TimePoint deadline) {
  waiters_.fetch_add(1);
  bool locked = false;
  {
    MutexLock lock(mutex_);
    bool in_time = true;
    while (!(locked = TryLock(what)) && in_time) in_time = left_.WaitUntil(mutex_, deadline);
  }
  waiters_.fetch_sub(1);
  return locked;
}

void Gate::Unlock() {
  owner_.store({}, std::memory_order_relaxed);
  what_.store(nullptr, std::memory_order_relaxed);
  taken_.store(false);
  if (waiters_.load() == 0) return;
  MutexLock lock(mutex_);
  left_.NotifyAll();
}

std::string Gate::Holder() const {
  const char* const what = what_.load(std::memory_order_relaxed);
  return what != nullptr ? what : "";
}

}  // namespace sirtaki::core
