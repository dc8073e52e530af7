// Which members of a process set share a host, and which carry the same slice between hosts.
#pragma once

#include <memory>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/types.h"

namespace sirtaki::ops::nccl {

struct HostSlices {
  core::RankRanges here;      // the members on this rank's host, each of which carries a slice
  core::RankRanges carriers;  // of this rank's slice, one on each host
  core::SetNumber set = 0;    // the carriers', far from those that the session gives
};
using HostSlicesPtr = std::shared_ptr<const HostSlices>;

// Null if the set is better off without: all members are on one host, or hosts have different
// numbers of them. The same on all members. Precondition: `rank` is one.
HostSlicesPtr SlicesOf(core::SetNumber set, const core::RankRanges& members, int rank,
                       const std::vector<int>& host_of_rank);

}  // namespace sirtaki::ops::nccl
