// Where the engine's own thread rests while other threads drive the engine: a place apart from the
// doorbell, so that their ringing does not wake it. Thread-safe; one thread parks.
#pragma once

#include <atomic>

#include "core/base/thread_annotations.h"
#include "core/base/types.h"

namespace sirtaki::core {

class Parking {
 public:
  // Rest lasts until Unpark, or `limit`. Announce comes first: whoever changes what decides about
  // parking after Announce sees occupied() and calls Unpark, so look at it once more between the
  // two calls; a limit that is over withdraws.
  void Announce() { occupied_.store(true, std::memory_order_seq_cst); }
  void Rest(TimePoint limit) SIRTAKI_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (!called_ && condition_.WaitUntil(mutex_, limit)) {
    }
    called_ = false;
    occupied_.store(false, std::memory_order_seq_cst);
  }

  bool occupied() const { return occupied_.load(std::memory_order_seq_cst); }

  void Unpark() SIRTAKI_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (!occupied()) return;
    called_ = true;
    condition_.NotifyOne();
  }

 private:
  std::atomic<bool> occupied_{false};
  Mutex mutex_;
  CondVar condition_;
  bool called_ SIRTAKI_GUARDED_BY(mutex_) = false;
};

}  // namespace sirtaki::core
