// What GPUs do not compute themselves, which is Adasum: the tensors of a group go to pages of the
// host, the host lanes reduce them as any, and they come back. The host's part has its place in the
// order like all host work; it begins when the tensors are there.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/engine/work.h"
#include "ops/cuda/device.h"
#include "ops/groups/group_task.h"
#include "ops/nccl/device_memory.h"

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

// The bounce runs on the device's lane, and returns when the results are in the tensors. Errors:
// those of CUDA, and of the host's part.
struct HostBounceContext {
  const cuda::Stream& stream;
  cuda::EventPool& events;
  PinnedMemory& host;
  // Returns when this says so, or with the error that ends the wait.
  std::function<core::Status(const std::function<core::Status(bool* over)>&)> await;
};
core::Status BounceThroughHost(const HostBounceContext& context, const GroupTask& group,
                               HostBounce& bounce);

}  // namespace sirtaki::ops::nccl
