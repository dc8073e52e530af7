// All-reduce of GPU tensors on several hosts without NCCL between them:
//
//   scatter   NCCL, within the host: each of its members reduces a slice of the packed tensors
//   cross     each slice to pinned memory, where the host lanes reduce it with its like on the
//             other hosts, and back: so the host's members use its network together
//   gather    NCCL, within the host: everybody gets all slices
//
// The members that carry a slice, one on each host, are a process set of the host's backend.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/base/types.h"
#include "ops/nccl/communicator.h"
#include "ops/nccl/group_launch.h"
#include "ops/nccl/host_bounce.h"
#include "ops/nccl/host_slices.h"

namespace sirtaki::ops::nccl {

// Whether the group is reduced like this, in a set that has slices: an all-reduce that NCCL can do.
// All members judge alike.
bool GoesByHosts(const GroupTask& group);

// What the host reduces of it, for HostLanes::StartLarge. Precondition: GoesByHosts.
std::shared_ptr<GroupTask> MakeSlicePart(const GroupTask& group, const HostSlices& slices,
                                         HostBouncePtr* bounce);

// The host goes on with its part, though nothing will come of the group: all members know that.
void Decline(HostBounce& bounce);

// What crosses of one group, on the device's lane.
class SliceCrossing {
 public:
  // All must outlive it. `here`: the communicator of the host's members.
  SliceCrossing(HostBounceContext context, HostBounce& bounce, Communicator& here)
      : context_(std::move(context)), bounce_(bounce), here_(here) {}

  Communicator& here() const { return here_; }

  // Returns when the host is through with it; what the stream is given from then on finds the
  // slice of all hosts in the place of this one's. Errors: those of CUDA, and of the host's part.
  core::Status Cross(std::byte* slice);
  // Returns when the memory that it has passed through may serve again.
  core::Status End() const;

 private:
  const HostBounceContext context_;
  HostBounce& bounce_;
  Communicator& here_;
  cuda::EventPtr back_;  // where the stream has fetched the slice
};

}  // namespace sirtaki::ops::nccl
