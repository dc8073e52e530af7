// Rows of --check-build about this machine: shared memory, limits, networks.
#pragma once

#include <cstdint>
#include <vector>

#include "launch/checks/check_build.h"
#include "launch/plan/routes.h"

namespace sirtaki::launch {

// Looks.
std::vector<BuildRow> FindMachineParts();

// How each is judged, with sizes in bytes. Pure.
BuildRow SharedMemoryRow(std::uint64_t free, std::uint64_t all);
BuildRow OpenFilesRow(std::uint64_t limit);
BuildRow LockedMemoryRow(std::uint64_t limit, bool has_infiniband);
BuildRow NetworkRow(const std::vector<Interface>& interfaces);

}  // namespace sirtaki::launch
