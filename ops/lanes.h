// The executor of a rank: its host lanes, and a lane for each of its GPUs. A batch is planned as a
// whole, and its groups, which never mix devices, go to the lanes of their devices. Messages of
// tensors on a device go by NCCL, or are the host's, in pinned memory.
//
// The first group of a set on a device brings a second operation into the order, on the large host
// lane: the members tell each other NCCL's unique id, and what keeps one of them from using its
// GPU, so that all fail with one cause. A rank whose first use of a GPU it is opens NCCL there.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"
#include "core/engine/executor.h"
#include "ops/host/host_lanes.h"
#include "ops/nccl/device_lane.h"
#include "ops/nccl/device_p2p.h"

namespace sirtaki::ops {

struct LanesOptions {
  HostLanesOptions host;  // the callbacks are those of all lanes
  // Opens NCCL; called once, from a lane's thread.
  std::function<core::Status(nccl::Library*)> load_nccl = nccl::Load;
  const void* kernels = nullptr;  // cuda::KernelImage; null: GPUs are refused with `why_no_kernels`
  std::string why_no_kernels;
  int kernels_toolkit = 0;  // cuda::KernelToolkit; 0: not known
  // The options of these names, or what stands for them.
  core::Duration nccl_limit = std::chrono::seconds(60);
  bool registers_arenas = true;  // gradient_arena=auto
  bool nccl_direct = true;
  bool nccl_shares = true;  // NCCL's variable NCCL_COMM_SPLIT_SHARE_RESOURCES is not 0
  int nccl_max_ctas = nccl::kUndefined;
  int nccl_cta_policy = nccl::kUndefined;
  // Messages of at least that many bytes go by NCCL between GPUs. A smaller one has passed pinned memory
  // before the receiver's answer would have come.
  std::int64_t least_direct_bytes = std::int64_t{256} << 10;
};

// Lanes are used as HostLanes. Work on a device is a cuda::DeviceWork.
class Lanes : public core::Executor {
 public:
  Lanes(LanesOptions options, Backends& backend);
  ~Lanes() override;

  void Start(core::RunBatch batch, core::TimePoint now) override;
  void AddSet(core::SetNumber set, const core::RankRanges& members, core::WorkPtr work,
              core::TimePoint now) override;
  void RemoveSet(core::SetNumber set, core::WorkPtr work, core::TimePoint now) override;
  void StartP2p(core::WorkPtr work, core::TimePoint now) override;
  bool Step() override { return host_->Step(); }
  bool NeedsStepping() const override { return host_->NeedsStepping(); }
  bool NeedsPolling() const override { return host_->NeedsPolling(); }
  bool Idle() const override SIRTAKI_EXCLUDES(mutex_);
  std::vector<core::RunningOperation> Running() const override SIRTAKI_EXCLUDES(mutex_);
  void Abandon(const core::Status& why) override SIRTAKI_EXCLUDES(mutex_);
  // Messages that nobody took do not keep a session from ending: those who wait for them are told. All
  // else is over, and its lanes end as those of the other ranks do.
  void EndMessages(const core::Status& why) SIRTAKI_EXCLUDES(mutex_);

 private:
  class Nccl;  // opened when a lane first needs it
  using Slot = std::uint32_t;

  // Direct communicators need what NCCL may not share.
  bool lacks_sharing() const { return options_.nccl_direct && !options_.nccl_shares; }
  void StartOnDevice(std::shared_ptr<GroupTask> group);
  // The lane of the group's slot. Null: this rank has joined and never used the slot.
  nccl::DeviceLane* LaneOf(const GroupTask& group) SIRTAKI_EXCLUDES(mutex_);
  nccl::RendezvousPtr Meet(const GroupTask& group, bool has_device);
  nccl::ToldRowsPtr TellRows(const std::shared_ptr<GroupTask>& group);
  // Starts the host's part of a group on a device.
  void StartHostPart(const GroupTask& group, core::WorkPtr work);
  nccl::DeviceP2p& DeviceP2pOf(const std::shared_ptr<cuda::Device>& device)
      SIRTAKI_EXCLUDES(mutex_);
  std::vector<nccl::DeviceLane*> DeviceLanes() const SIRTAKI_EXCLUDES(mutex_);
  std::vector<nccl::DeviceP2p*> DeviceP2ps() const SIRTAKI_EXCLUDES(mutex_);

  const LanesOptions options_;
  const std::shared_ptr<Nccl> nccl_;
  const std::shared_ptr<nccl::ProcessCommunicators> communicators_;

  // What no lane has been told yet, by set and slot, or null; used under the token. This rank may
  // have joined then.
  std::map<std::pair<core::SetNumber, Slot>, nccl::RendezvousPtr> met_;
  std::uint64_t groups_ = 0;  // of devices, started so far
  core::Status driver_;       // why it does not load our kernels

  mutable core::Mutex mutex_;
  // They come, but do not go.
  std::map<Slot, std::unique_ptr<nccl::DeviceLane>> devices_ SIRTAKI_GUARDED_BY(mutex_);
  std::map<const cuda::Device*, std::unique_ptr<nccl::DeviceP2p>> device_p2ps_
      SIRTAKI_GUARDED_BY(mutex_);
  std::unique_ptr<HostLanes> host_;  // goes first
};

}  // namespace sirtaki::ops
