// The events of a rank as a trace that Chrome's tracing page and Perfetto show: a JSON array of
// objects, one a line; the file is a whole array after every write, so that it can be read while
// the rank runs and after it was killed.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>

#include "core/base/status.h"
#include "core/trace/event.h"

namespace sirtaki::core::trace {

// The identity says whose trace it is. The process of a trace is the rank, its threads are the
// tracks.
struct TimelineIdentity {
  int rank = 0;
  std::string host;
  Duration offset{};    // added to this rank's clock gives rank 0's
  TimePoint origin{};   // of rank 0's clock: time 0 of the trace
  std::string session;  // the same on all ranks of a job, and of no other
};

// The file is not thread-safe.
class TimelineFile {
 public:
  TimelineFile() = default;
  ~TimelineFile();
  TimelineFile(const TimelineFile&) = delete;
  TimelineFile& operator=(const TimelineFile&) = delete;

  // Makes the file, in place of one that is there; its folder has to exist. `max_bytes`: what would
  // make it longer is left out, after one line that says so.
  Status Open(const std::string& path, const TimelineIdentity& identity, std::int64_t max_bytes);
  // kBackend when the file cannot be written: it is then closed, and whole up to there.
  Status Append(std::span<const Event> events);
  void Close();

  bool is_open() const { return descriptor_ >= 0; }
  bool is_full() const { return full_; }

 private:
  // Lines of the next write, if there is room for all of them; else one that says so, at this time.
  void Add(std::string_view lines, TimePoint at);
  void AppendPhases(const Event& event);  // to lines_, the event's
  Status Flush();

  std::string path_;
  TimelineIdentity identity_;
  std::int64_t max_bytes_ = 0;
  int descriptor_ = -1;
  std::int64_t end_ = 0;  // where the closing bracket stands
  bool empty_ = true;
  bool full_ = false;
  std::set<std::uint32_t> named_;          // tracks
  std::unordered_set<std::string> begun_;  // by their ids, those whose end is to come
  std::string lines_;                      // of an event: kept for its memory
  std::string text_;                       // of the next write
};

}  // namespace sirtaki::core::trace
