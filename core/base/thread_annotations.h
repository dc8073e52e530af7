// Mutexes that clang's thread-safety analysis understands (-Wthread-safety); plain ones elsewhere.
#pragma once

#include <condition_variable>
#include <mutex>

#include "core/base/types.h"

#if defined(__clang__)
#define SIRTAKI_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define SIRTAKI_THREAD_ANNOTATION(x)
#endif

#define SIRTAKI_CAPABILITY(name) SIRTAKI_THREAD_ANNOTATION(capability(name))
#define SIRTAKI_SCOPED_CAPABILITY SIRTAKI_THREAD_ANNOTATION(scoped_lockable)
#define SIRTAKI_GUARDED_BY(mutex) SIRTAKI_THREAD_ANNOTATION(guarded_by(mutex))
#define SIRTAKI_REQUIRES(...) SIRTAKI_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define SIRTAKI_EXCLUDES(...) SIRTAKI_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define SIRTAKI_ACQUIRE(...) SIRTAKI_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define SIRTAKI_TRY_ACQUIRE(...) SIRTAKI_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define SIRTAKI_RELEASE(...) SIRTAKI_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define SIRTAKI_NO_THREAD_SAFETY_ANALYSIS SIRTAKI_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace sirtaki::core {

class SIRTAKI_CAPABILITY("mutex") Mutex {
 public:
  void Lock() SIRTAKI_ACQUIRE() { mutex_.lock(); }
  bool TryLock() SIRTAKI_TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  void Unlock() SIRTAKI_RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class SIRTAKI_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) SIRTAKI_ACQUIRE(mutex) : mutex_(mutex) { mutex_.Lock(); }
  // Takes over a lock that the thread has.
  MutexLock(Mutex& mutex, std::adopt_lock_t /*tag*/) SIRTAKI_REQUIRES(mutex) : mutex_(mutex) {}
  ~MutexLock() SIRTAKI_RELEASE() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits return spuriously, as those of std::condition_variable: loop over the condition.
class CondVar {
 public:
  void Wait(Mutex& mutex) SIRTAKI_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }

  // False once the deadline has passed; TimePoint::max() is never.
  bool WaitUntil(Mutex& mutex, TimePoint deadline) SIRTAKI_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    bool in_time = true;
    if (deadline == TimePoint::max()) {
      condition_.wait(lock);
    } else {
      in_time = condition_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    }
    lock.release();
    return in_time;
  }

  void NotifyOne() { condition_.notify_one(); }
  void NotifyAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace sirtaki::core
