// A session records what its rank does, in these files: timeline, flight record, metrics.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/base/topology.h"
#include "core/config/config.h"
#include "core/trace/flight_record.h"
#include "core/trace/metrics_writer.h"
#include "core/trace/observer.h"
#include "core/trace/step_clock.h"
#include "core/trace/timeline_writer.h"
#include "session/record_keeper.h"

namespace sirtaki::session {

// These names say in words what buckets hold (`the gradients of "w", "b" and 3 more`), by keys.
using BucketNames = std::map<std::string, std::string>;

// Thread-safe. A file that cannot be written is a warning, and never what a run ends of.
class SessionObservability {
 public:
  struct Options {
    core::Config config;
    core::Topology topology;
    core::Duration offset{};   // of this rank's clock to rank 0's
    core::TimePoint origin{};  // of rank 0's clock: time 0 of all timelines
    std::string session;       // the same on all ranks, and of no other job
    bool is_process = true;    // the rank is a process; else one of its threads
    std::function<core::trace::FlightRecord(const std::string& why)> describe;
  };
  SessionObservability(core::trace::ObserverPtr observer, Options options);
  ~SessionObservability();

  const core::trace::ObserverPtr& observer() const { return observer_; }
  core::trace::StepClock& steps() { return steps_; }
  core::Duration offset() const { return options_.offset; }
  const std::string& session() const { return options_.session; }

  // Begins what the options ask for.
  void Begin();
  // Writes what is not yet written before it returns; nothing is written after it. False: a write has
  // not ended, so this must stay for ever. Idempotent.
  bool End();

  // The group has failed. Never blocks.
  void NoteFault();

  // `path` is as the option timeline. Errors: kInvalidArgument if one is being written; kBackend if
  // the file cannot be made.
  core::Status StartTimeline(const std::string& path) SIRTAKI_EXCLUDES(timeline_mutex_);
  void StopTimeline() { timeline_.Stop(); }

  // A mark of the program's own.
  void Mark(std::string_view text, core::TimePoint begin, core::TimePoint end);

  // Called once at the session's end, for what has no other end by then; null: nothing is to be said.
  void SetLastWords(std::function<void()> say) SIRTAKI_EXCLUDES(mutex_);
  void SayLastWords() SIRTAKI_EXCLUDES(mutex_);

  // The names are told from now on, also after the optimizer has gone, as it does when a step
  // throws.
  void NoteBuckets(const std::shared_ptr<const BucketNames>& names) SIRTAKI_EXCLUDES(mutex_);
  // The text of a key; behind that of a bucket, what it holds:
  // `bucket 0 of arena 1 (the gradients of "w", "b")`.
  std::string KeyText(const std::string& key) const SIRTAKI_EXCLUDES(mutex_);
  // The text with what buckets hold instead of their numbers, where that is known here.
  std::string InWords(const std::string& text) const SIRTAKI_EXCLUDES(mutex_);

 private:
  void SetRecordsAside() const;
  void WriteRecord(const std::string& why);
  // Null: not known.
  const std::string* Held(const std::string& key) const SIRTAKI_REQUIRES(mutex_);

  const core::trace::ObserverPtr observer_;
  const Options options_;
  const std::string record_path_;  // empty: no record is written
  // Nobody else waits for a rank that is alone: unless a folder was named, it leaves one at SIGUSR1
  // only.
  const bool only_if_asked_;
  bool told_ = false;  // of a record, to whoever reads the log; WriteRecord's, which runs by itself
  core::trace::StepClock steps_;
  core::trace::TimelineWriter timeline_;
  core::trace::MetricsWriter metrics_;
  core::Mutex timeline_mutex_;  // held while files are made: of what begins and ends
  bool ended_ SIRTAKI_GUARDED_BY(timeline_mutex_) = false;
  mutable core::Mutex mutex_;  // of what follows; the engine takes it
  std::shared_ptr<RecordKeeper::Registration> records_ SIRTAKI_GUARDED_BY(mutex_);  // set by Begin
  bool fault_noted_ SIRTAKI_GUARDED_BY(mutex_) = false;
  std::deque<std::shared_ptr<const BucketNames>> buckets_ SIRTAKI_GUARDED_BY(mutex_);
  core::Mutex words_mutex_;  // held while they are said
  std::function<void()> last_words_ SIRTAKI_GUARDED_BY(words_mutex_);
};

}  // namespace sirtaki::session
