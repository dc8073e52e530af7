// What a rank of Open MPI leaves in shared memory when it is killed together with its launcher,
// which would remove it otherwise.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "core/environment.h"

namespace sirtaki::launch {

// How the names of this job's segments in /dev/shm begin; none if this is no rank of Open MPI 4,
// the only one that leaves any. Pure.
std::optional<std::string> SegmentPrefix(const core::EnvironmentView& env, std::string_view host,
                                         unsigned user);

// Removes the files of the folder whose names begin so.
void RemoveSegments(const std::string& folder, std::string_view prefix);

}  // namespace sirtaki::launch
