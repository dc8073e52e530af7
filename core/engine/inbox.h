// An inbox holds what threads leave for the one that empties it. Thread-safe.
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"

namespace sirtaki::core {

template <typename T>
class Inbox {
 public:
  void Post(T item) SIRTAKI_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    items_.push_back(std::move(item));
    any_ = true;
  }
  std::vector<T> Take() SIRTAKI_EXCLUDES(mutex_) {
    if (!any_.exchange(false)) return {};
    MutexLock lock(mutex_);
    return std::exchange(items_, {});
  }
  bool any() const { return any_; }

 private:
  Mutex mutex_;
  std::vector<T> items_ SIRTAKI_GUARDED_BY(mutex_);
  std::atomic<bool> any_{false};
};

}  // namespace sirtaki::core
