#include "core/threads/gate.h"

namespace sirtaki::core {

bool Gate::TryLock(const char* what) {
  std::thread::id nobody;
  if (!owner_.compare_exchange_strong(nobody, std::this_thread::get_id())) return false;
  what_.store(what, std::memory_order_relaxed);
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
  what_.store(nullptr, std::memory_order_relaxed);
  owner_.store({});
  if (waiters_.load() == 0) return;
  MutexLock lock(mutex_);
  left_.NotifyAll();
}

// The analysis cannot know that the gate is not held after the deadline.
GateLock::GateLock(Gate& gate, const char* what,
                   TimePoint deadline) SIRTAKI_NO_THREAD_SAFETY_ANALYSIS : gate_(gate) {
  // A gate that is free is taken without the mutex of those that wait.
  if (gate_.TryLock(what) || gate_.LockUntil(what, deadline)) return;
  const std::string holder = gate_.Holder();
  late_ = Status(StatusCode::kTimedOut, std::string(what) +
                                            " came to its deadline while another thread was in " +
                                            (holder.empty() ? what : holder));
}

GateLock::~GateLock() SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
  if (is_held()) gate_.Unlock();
}

std::string Gate::Holder() const {
  const char* const what = what_.load(std::memory_order_relaxed);
  return what != nullptr ? what : "";
}

}  // namespace sirtaki::core
