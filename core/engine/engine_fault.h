// The fault of an engine, and how far it has come.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"

namespace sirtaki::core {

// Thread-safe. Each stage comes after the one before it.
class EngineFault {
 public:
  bool known() const { return stage_ >= Stage::kKnown; }    // calls fail with it
  bool failed() const { return stage_ >= Stage::kFailed; }  // what was under way here has failed
  bool told() const { return stage_ >= Stage::kTold; }      // it has left this process
  Status status() const SIRTAKI_EXCLUDES(mutex_) {          // ok while it is not known
    if (!known()) return Status::Ok();
    const MutexLock lock(mutex_);
    return status_;
  }

  // False: there is one already, which stays.
  bool Set(const Status& why) SIRTAKI_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    if (!status_.ok()) return false;
    status_ = why;
    stage_ = Stage::kKnown;
    return true;
  }
  // All ranks have agreed on this one, whatever was set here before.
  void Agree(const Status& why) SIRTAKI_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    status_ = why;
    if (!known()) stage_ = Stage::kKnown;
  }
  // By the holder of the engine's token, once it is known.
  void NoteFailed() { stage_ = Stage::kFailed; }
  void NoteTold() { stage_ = Stage::kTold; }

 private:
  enum class Stage : std::uint8_t { kNone, kKnown, kFailed, kTold };

  mutable Mutex mutex_;
  Status status_ SIRTAKI_GUARDED_BY(mutex_);
  std::atomic<Stage> stage_{Stage::kNone};
};

}  // namespace sirtaki::core
