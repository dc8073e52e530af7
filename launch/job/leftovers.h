// A rank has this beside its program: processes that it has started, which a rank that ends badly
// leaves, and in shared memory what Open MPI's launcher would remove, had it not been killed as well.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/base/environment.h"

namespace sirtaki::launch {

// How the names of this job's segments in /dev/shm may begin; none if this is no rank of Open MPI.
// (MPICH leaves some too, whose names do not tell the job.) Pure.
std::vector<std::string> SegmentPrefixes(const core::EnvironmentView& env, std::string_view host,
                                         unsigned user);

// Removes the files of the folder whose names begin so.
void RemoveSegments(const std::string& folder, std::string_view prefix);

// Kills the processes of this one's group, but not this one. Leaving the group to kill it whole is
// no way: MPICH makes each rank lead a session.
void KillOthersOfGroup();
// Sends a signal to those of the processes of this one's group that catch or block it, but not to this
// one: it would end the others.
void SignalOthersThatCatch(int signal);

// The processes that children of this one leave behind belong to it from the call on.
void AdoptOrphans();
// Tells those of this name to end: a launcher that is killed leaves its ssh to a host that does not
// answer.
void EndOrphans(std::string_view name);

}  // namespace sirtaki::launch
