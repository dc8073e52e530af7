// The timelines of a job's ranks, as core/trace/timeline writes them, in one file.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/base/types.h"

namespace sirtaki::launch {

// The unit of a trace's times.
inline double Microseconds(core::Duration duration) {
  return static_cast<double>(std::chrono::nanoseconds(duration).count()) / 1e3;
}

// What the first line of a timeline says of it; what it does not say is empty, or none.
struct TimelineHead {
  std::string session;
  std::string host;
  std::optional<core::TimePoint> zero;  // the clock of that host at time 0 of the trace
};
// None if the file has no first line.
std::optional<TimelineHead> HeadOf(const std::string& path);

// A file of a merged timeline, each of whose objects may be moved.
struct TimelinePart {
  std::string path;
  int process = -1;        // its number in the merged one; -1: nothing is moved
  std::string title = {};  // of that process
  core::Duration later{};  // is added to its times
};

// FindTimelines finds the files "rank-<number>.json" of a folder, by number, that are of the same run as
// the first of them: an earlier run of more ranks has left others. `notes` says, a line each, which were
// left out. kInvalidArgument if there are none.
core::Status FindTimelines(const std::string& folder, std::vector<TimelinePart>* parts,
                           std::vector<std::string>* notes);

// MergeTimelines writes these objects of JSON and the lines of all parts to `output`, which has all of
// them, or, whatever happens, what it had before. A last line that was cut off is left out;
// kInvalidArgument, with file and line, for any other that is none of a timeline.
core::Status MergeTimelines(const std::vector<TimelinePart>& parts,
                            const std::vector<std::string>& objects, const std::string& output);

}  // namespace sirtaki::launch
