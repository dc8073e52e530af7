#include "core/threads/gate.h"

namespace sirtaki::core {

bool Gate::Note(bool locked, const char* what) {
  if (!locked) return false;
  what_.store(what, std::memory_order_relaxed);
  owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  return true;
}

bool Gate::TryLock(const char* what) { return Note(mutex_.try_lock(), what); }

bool Gate::LockUntil(const char* what, TimePoint deadline) {
  return Note(mutex_.try_lock_until(deadline), what);
}

void Gate::Unlock() {
  owner_.store({}, std::memory_order_relaxed);
  what_.store(nullptr, std::memory_order_relaxed);
  mutex_.unlock();
}

std::string Gate::Holder() const {
  const char* const what = what_.load(std::memory_order_relaxed);
  return what != nullptr ? what : "";
}

}  // namespace sirtaki::core
