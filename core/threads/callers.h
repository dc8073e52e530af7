// Which threads make calls. Where there is one alone, and it waits, nothing is called before that
// wait is over.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/thread_annotations.h"

namespace sirtaki::core {

// The mark is the calling thread's for as long as it lives; no other thread gets the same.
inline const std::shared_ptr<const void>& ThisThread() {
  static thread_local const std::shared_ptr<const void> kMark = std::make_shared<const char>('\0');
  return kMark;
}

// While it lives, what the calling thread calls counts as called by another one, which waits for it:
// that of autograd for a GPU serves whoever called backward().
class ServingThread {
 public:
  ServingThread() { ++depth_; }
  ~ServingThread() { --depth_; }
  ServingThread(const ServingThread&) = delete;
  ServingThread& operator=(const ServingThread&) = delete;

  static bool IsThis() { return depth_ > 0; }

 private:
  static inline thread_local int depth_ = 0;
};

// Thread-safe.
class Callers {
 public:
  // The calling thread makes calls.
  void Note() SIRTAKI_EXCLUDES(mutex_) {
    const bool serves = ServingThread::IsThis();
    std::uint64_t& noted = serves ? noted_serving_ : noted_;
    if (noted == number_) return;
    noted = number_;
    MutexLock lock(mutex_);
    Threads& threads = serves ? serving_ : threads_;
    std::erase_if(threads, [](const auto& thread) { return thread.expired(); });
    const std::shared_ptr<const void>& self = ThisThread();
    const bool known = std::any_of(threads.begin(), threads.end(),
                                   [&](const auto& thread) { return thread.lock() == self; });
    if (!known) threads.emplace_back(self);
  }

  // True if at most one of the noted threads lives, and at most one that serves it.
  bool AtMostOne() const SIRTAKI_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return Living(threads_) <= 1 && Living(serving_) <= 1;
  }

 private:
  using Threads = std::vector<std::weak_ptr<const void>>;

  static std::ptrdiff_t Living(const Threads& threads) {
    return std::count_if(threads.begin(), threads.end(),
                         [](const auto& thread) { return !thread.expired(); });
  }

  static inline std::atomic<std::uint64_t> made_{0};
  // The number of the last Callers that this thread told, by itself and for another thread.
  static inline thread_local std::uint64_t noted_ = 0;
  static inline thread_local std::uint64_t noted_serving_ = 0;

  const std::uint64_t number_ = ++made_;
  mutable Mutex mutex_;
  Threads threads_ SIRTAKI_GUARDED_BY(mutex_);
  Threads serving_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::core
