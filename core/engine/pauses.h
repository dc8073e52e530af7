// Whether an engine is paused, and whether those of other ranks may be. Thread-safe.
#pragma once

#include <atomic>

#include "core/base/thread_annotations.h"

namespace sirtaki::core {

class Pauses {
 public:
  // False: they are over for good.
  bool Begin() SIRTAKI_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (!over_) here_ = true;
    return here_;
  }
  void End() SIRTAKI_EXCLUDES(mutex_) { Set(false); }
  // The engine is about to end. It is not paused any more, and a thread that is just going to pause
  // it cannot. The other ranks may be paused still.
  void EndForGood() SIRTAKI_EXCLUDES(mutex_) { Set(true); }
  void ExpectElsewhere(bool expected) { elsewhere_ = expected; }

  bool here() const { return here_; }
  bool anywhere() const { return here_ || elsewhere_; }

 private:
  void Set(bool over) {
    MutexLock lock(mutex_);
    over_ = over_ || over;
    if (over && here_) elsewhere_ = true;
    here_ = false;
  }

  Mutex mutex_;
  bool over_ SIRTAKI_GUARDED_BY(mutex_) = false;
  std::atomic<bool> here_{false};  // changes under the mutex
  std::atomic<bool> elsewhere_{false};
};

}  // namespace sirtaki::core
