// A lock that knows who has it, around something that allows one thread at a time. A thread that
// waits can say what for, and can give up.
#pragma once

#include <atomic>
#include <string>
#include <thread>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/base/types.h"

namespace sirtaki::core {

// Thread-safe. Not recursive: who has it must not wait for it, and can ask.
class SIRTAKI_CAPABILITY("mutex") Gate {
 public:
  Gate() = default;
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  // `what`: a literal, what the thread is in while it has the gate. False: another thread has it, in
  // LockUntil still at the deadline.
  bool TryLock(const char* what) SIRTAKI_TRY_ACQUIRE(true);
  bool LockUntil(const char* what, TimePoint deadline) SIRTAKI_TRY_ACQUIRE(true);
  // The thread that has the gate gives it up. This costs no system call when nobody waits.
  void Unlock() SIRTAKI_RELEASE();

  bool IsHeld() const { return owner_.load() != std::thread::id(); }
  bool IsHeldByThisThread() const { return owner_.load() == std::this_thread::get_id(); }
  // What the thread that has it is in; empty: nobody has it.
  std::string Holder() const;

 private:
  std::atomic<std::thread::id> owner_;      // none: nobody has it
  std::atomic<const char*> what_{nullptr};  // the owner sets this
  std::atomic<int> waiters_{0};
  Mutex mutex_;  // of those that wait
  CondVar left_;
};

// A gate lock has the gate for as long as it lives, unless the deadline was over first: ask is_held().
class SIRTAKI_SCOPED_CAPABILITY GateLock {
 public:
  GateLock(Gate& gate, const char* what, TimePoint deadline) SIRTAKI_ACQUIRE(gate);
  ~GateLock() SIRTAKI_RELEASE();
  GateLock(const GateLock&) = delete;
  GateLock& operator=(const GateLock&) = delete;

  bool is_held() const { return late_.ok(); }
  // kTimedOut, with what both threads wanted, where it is not held.
  const Status& status() const { return late_; }

 private:
  Gate& gate_;
  Status late_;
};

}  // namespace sirtaki::core
