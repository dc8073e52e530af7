// The hosts that a batch system has given to the job that this process stands in. Pure: the
// environment and the files are arguments.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/environment.h"
#include "core/base/status.h"
#include "core/machine/cgroup.h"
#include "launch/hosts/host_list.h"

namespace sirtaki::launch {

enum class BatchSystem : std::uint8_t { kNone, kSlurm, kPbs, kLsf };

struct Allocation {
  BatchSystem system = BatchSystem::kNone;
  HostList hosts;
  std::string from;  // where that stands: "SLURM_JOB_NODELIST"
};

// kNone if this is no job of a batch system. kInvalidArgument if it is one, but what it says of its
// hosts is not understood: names the variable, or the file and its line.
core::Status FindAllocation(const core::EnvironmentView& env, const core::FileReader& read,
                            Allocation* out);

// Slurm's short form of names, "node[01-03,7],gpu1", in full; `from` is for texts.
core::Status ExpandNodeList(std::string_view text, std::string_view from,
                            std::vector<std::string>* out);
// Slurm's short form of counts, "4(x2),1": 4, 4, 1.
core::Status ExpandCounts(std::string_view text, std::string_view from, std::vector<int>* out);

}  // namespace sirtaki::launch
