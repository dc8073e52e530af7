// What GPUs do not compute themselves, which is Adasum: the tensors of a group go to pages of the
// host, the host lanes reduce them as any, and they come back. The host's part has its place in the
// order like all host work; it begins when the tensors are there.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "core/engine/work.h"
#include "ops/groups/group_task.h"

namespace sirtaki::ops::nccl {

// Shared by the lane that brings the tensors and the one that reduces them.
struct HostBounce {
  std::vector<core::WorkPtr> works;  // by item; in place, in memory that is set before `there`
  core::HandlePtr done = std::make_shared<core::HandleState>();  // by the host
  std::shared_ptr<std::atomic<bool>> there = std::make_shared<std::atomic<bool>>(false);
};
using HostBouncePtr = std::shared_ptr<HostBounce>;

// The host's part of a group on a device, for HostLanes::StartGroups. `bounce`: null if this rank
// has joined, which then takes part on the host alone.
std::shared_ptr<GroupTask> MakeHostPart(const GroupTask& group, HostBouncePtr* bounce);

}  // namespace sirtaki::ops::nccl
