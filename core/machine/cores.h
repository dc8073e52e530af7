// How many cores processes may use together: their affinity masks and the quota of their cgroup.
#pragma once

#include <span>

#include "core/base/rank_ranges.h"
#include "core/machine/cgroup.h"

namespace sirtaki::core {

struct CpuShare {
  RankRanges cpus;     // numbers of the cores that the affinity mask allows
  double quota = 0.0;  // cores' worth of time that the cgroup allows; 0: no limit
  bool operator==(const CpuShare&) const = default;
};

// The share is that of the calling process, as it is now. What cannot be found out counts as no
// limit.
CpuShare CpusOfThisProcess();

// The tightest CPU quota from this process's cgroup up to the root, versions 1 and 2; 0: none.
double CgroupCpuQuota(const FileReader& read);

// Counts the whole cores that these processes of one host have together, at least 1: the union of
// their masks, and no more than the largest quota if all have one.
int SharedCores(std::span<const CpuShare> processes);

}  // namespace sirtaki::core
