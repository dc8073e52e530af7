// Writes a timeline while the rank runs: a thread that follows the recorder into a file, from when
// it is started until it is stopped. Without it nothing of this costs anything.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"
#include "core/trace/observer.h"
#include "core/trace/timeline.h"

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
  // Everything up to now is in the file when this returns. Idempotent.
  void Stop() SIRTAKI_EXCLUDES(control_);
  // Everything up to now is in the file when this returns, unless that takes longer than `patience`
  // or nothing is being written.
  void Flush(Duration patience) SIRTAKI_EXCLUDES(mutex_);

 private:
  void Run() SIRTAKI_EXCLUDES(mutex_);
  void FollowUntilStopped() SIRTAKI_EXCLUDES(mutex_);
  // Writes what has happened since the last time; returns how many events that were.
  std::uint64_t Follow(bool to_the_end);
  void Fail(const Status& why);

  const ObserverPtr observer_;
  std::atomic<bool> failed_{false};  // the thread has ended, or is about to
  Mutex control_;                    // held for all of Start and Stop
  std::thread thread_ SIRTAKI_GUARDED_BY(control_);

  // The thread, while there is one, uses these options.
  TimelineOptions options_;
  TimelineFile file_;
  std::uint64_t next_ = 0;  // number of the next event
  TimePoint looked_{};
  std::vector<Event> events_;

  Mutex mutex_;
  CondVar changed_;
  bool stop_ SIRTAKI_GUARDED_BY(mutex_) = false;
  bool runs_ SIRTAKI_GUARDED_BY(mutex_) = false;
  bool flush_ SIRTAKI_GUARDED_BY(mutex_) = false;  // somebody waits for it
};

}  // namespace sirtaki::core::trace
