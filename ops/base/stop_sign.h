// A stop sign tells everyone who waits or works that it is over, and why.
#pragma once

#include <atomic>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"

namespace sirtaki::ops {

// Thread-safe.
class StopSign {
 public:
  // The first reason stays.
  void Raise(const core::Status& why) SIRTAKI_EXCLUDES(mutex_) {
    core::MutexLock lock(mutex_);
    if (!why_.ok()) return;
    why_ = why.ok() ? core::Status(core::StatusCode::kAborted, "aborted") : why;
    raised_.store(true, std::memory_order_release);
  }
  bool raised() const { return raised_.load(std::memory_order_acquire); }
  // Ok: go on.
  core::Status why() const SIRTAKI_EXCLUDES(mutex_) {
    if (!raised()) return core::Status::Ok();
    core::MutexLock lock(mutex_);
    return why_;
  }

 private:
  std::atomic<bool> raised_{false};
  mutable core::Mutex mutex_;
  core::Status why_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::ops
