// The timelines of a job's ranks, as core/trace/timeline writes them, in one file.
#pragma once

#include <string>
#include <vector>

#include "core/base/status.h"

namespace sirtaki::launch {

// The files "rank-<number>.json" of a folder, by number, that are of the same run as the first of
// them: an earlier run of more ranks has left others. `notes` says, a line each, which were left
// out. kInvalidArgument if there are none.
core::Status FindTimelines(const std::string& folder, std::vector<std::string>* paths,
                           std::vector<std::string>* notes);

// Writes the lines of all `paths` to `output`, which has all of them, or, whatever happens, what it
// had before. A last line that was cut off is left out; kInvalidArgument, with file and line, for
// any other that is none of a timeline.
core::Status MergeTimelines(const std::vector<std::string>& paths, const std::string& output);

}  // namespace sirtaki::launch
