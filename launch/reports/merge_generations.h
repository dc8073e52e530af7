// The timelines of an elastic job, which has one for each rank of each generation, become one.
#pragma once

#include <string>
#include <vector>

#include "core/base/status.h"
#include "launch/reports/generations.h"
#include "launch/reports/merge_timelines.h"

namespace sirtaki::launch {

// MergeTimelines takes these. A process is a worker, whatever its rank; sirtakirun has one too, with the
// generations and how long each change took. Time 0 is when it decided the first one.
struct GenerationsTimeline {
  std::vector<TimelinePart> parts;
  std::vector<std::string> objects;
  int workers = 0;  // that have a part
};

// The folder has a folder for each generation. `notes` says, a line each, which files were left out, and why.
GenerationsTimeline TimelineOf(const std::string& folder,
                               const std::vector<Generation>& generations,
                               std::vector<std::string>* notes);

}  // namespace sirtaki::launch
