// Writes a timeline while the rank runs: a thread that follows the recorder into a file, from when
// it is started until it is stopped. Without it nothing of this costs anything.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/base/thread_annotations.h"
#include "core/trace/observer.h"
#include "core/trace/timeline.h"
#include "core/trace/trace_files.h"

namespace sirtaki::core::trace {

struct TimelineOptions {
  std::string path;
  TimelineIdentity identity;
  std::int64_t max_bytes = 0;  // zero: as long as it gets
  // The interval lies between two looks at the recorder, which come sooner while events would be
  // lost.
  Duration interval = std::chrono::milliseconds(100);
  // The file could not be written, which ends it: called once at most, on the writer's thread or in
  // Stop. Must not call the writer.
  std::function<void(const Status& why)> on_error;
  // Stop waits this long for a file system that does not answer, then leaves the file as it is.
  Duration patience = kFilePatience;
};

// Thread-safe.
class TimelineWriter {
 public:
  explicit TimelineWriter(ObserverPtr observer) : observer_(std::move(observer)) {}
  ~TimelineWriter() { Stop(); }
  TimelineWriter(const TimelineWriter&) = delete;
  TimelineWriter& operator=(const TimelineWriter&) = delete;

  // Writes what happens from now on. Errors: kInvalidArgument if one is being written already,
  // those of SetAside and of TimelineFile::Open, and if there is no thread. What stood there is set
  // aside.
  Status Start(TimelineOptions options) SIRTAKI_EXCLUDES(control_);
  // Everything up to now is in the file when this returns, or on_error has been told why not.
  // Idempotent.
  void Stop() SIRTAKI_EXCLUDES(control_);
  // Everything up to now is in the file when this returns, unless that takes longer than `patience`
  // or nothing is being written.
  void Flush(Duration patience) SIRTAKI_EXCLUDES(mutex_);

 private:
  struct Part;  // what one thread refers to
  // Null: none is being written.
  std::shared_ptr<Part> part() SIRTAKI_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return part_;
  }

  void End() SIRTAKI_REQUIRES(control_) SIRTAKI_EXCLUDES(mutex_);

  const ObserverPtr observer_;
  Mutex control_;  // held for all of Start and Stop
  Mutex mutex_;
  std::shared_ptr<Part> part_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::core::trace
