// The events of a rank as a trace that Chrome's tracing page and Perfetto show: a JSON array of
// objects, one a line. What a line says is pure; the file is a whole array after every write, so
// that it can be read while the rank runs and after it was killed.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"
#include "core/trace/event.h"

namespace sirtaki::core::trace {

// Whose trace it is. The process of a trace is the rank, its threads are the tracks.
struct TimelineIdentity {
  int rank = 0;
  std::string host;
  Duration offset{};   // added to this rank's clock gives rank 0's
  TimePoint origin{};  // of rank 0's clock: time 0 of the trace
};

// The lines that name the rank and its tracks, and those of one event: objects without the comma
// after them, some kinds none, some two.
void AppendNames(const TimelineIdentity& identity, std::vector<std::string>* lines);
void AppendLines(const TimelineIdentity& identity, const Event& event,
                 std::vector<std::string>* lines);

// Not thread-safe.
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
  const std::string& path() const { return path_; }

 private:
  Status Write(const std::vector<std::string>& lines);

  std::string path_;
  TimelineIdentity identity_;
  std::int64_t max_bytes_ = 0;
  int descriptor_ = -1;
  std::int64_t end_ = 0;  // where the closing bracket stands
  bool empty_ = true;
  bool full_ = false;
};

}  // namespace sirtaki::core::trace
