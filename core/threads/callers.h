// Which threads make calls. Where there is one alone, and it waits, nothing is called before that
// wait is over.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/thread_annotations.h"

namespace sirtaki::core {

// As long as the calling thread lives; no other thread gets the same.
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
    if (noted_ == number_ || ServingThread::IsThis()) return;
    noted_ = number_;
    MutexLock lock(mutex_);
    const std::shared_ptr<const void>& self = ThisThread();
    std::erase_if(threads_, [](const auto& thread) { return thread.expired(); });
    const bool known = std::any_of(threads_.begin(), threads_.end(),
                                   [&](const auto& thread) { return thread.lock() == self; });
    if (!known) threads_.emplace_back(self);
  }

  // Of those that live.
  bool AtMostOne() const SIRTAKI_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return std::count_if(threads_.begin(), threads_.end(),
                         [](const auto& thread) { return !thread.expired(); }) <= 1;
  }

 private:
  static inline std::atomic<std::uint64_t> made_{0};
  static inline thread_local std::uint64_t noted_ = 0;  // of the last one that this thread told

  const std::uint64_t number_ = ++made_;
  mutable Mutex mutex_;
  std::vector<std::weak_ptr<const void>> threads_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::core
