// The lane of one GPU: a thread that puts groups into one stream, in the agreed order. Handles
// complete when their group is launched; the lane keeps its tensors until the device is through.
//
// A set's communicator is made before the set's first group, by all its members at that place of
// the order; it goes with the set.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/engine/executor.h"
#include "core/trace/observer.h"
#include "ops/cuda/device.h"
#include "ops/groups/lane_task.h"
#include "ops/nccl/communicator.h"
#include "ops/nccl/host_bounce.h"
#include "ops/nccl/rendezvous.h"

namespace sirtaki::ops::nccl {

struct DeviceLaneOptions {
  std::shared_ptr<cuda::Device> device;
  std::shared_ptr<ProcessCommunicators> communicators;
  const void* kernels = nullptr;                    // cuda::KernelImage
  core::Duration limit = std::chrono::seconds(60);  // for one call of NCCL's on the host
  bool registers_arenas = true;
  bool direct = true;         // its communicators, once their ranks are connected
  int max_ctas = kUndefined;  // of its communicators
  int cta_policy = kUndefined;
  // A group failed: called once, from the lane's thread.
  std::function<void(const core::Status& why, const std::string& tensor)> on_failure;
  // Something ended (rings the engine's doorbell).
  std::function<void()> on_progress;
  core::trace::ObserverPtr observer;  // null: nothing is recorded
};

// Thread-safe; nothing here blocks but the destructor. No lock is held while a callback, a handle,
// CUDA or NCCL is called. The first failure, or Abandon, ends the lane: the communicators of all
// lanes of the process are aborted together, and every handle that is not complete completes with
// that status, whether the abort comes to its end or not. The callbacks are not called after the
// destructor.
class DeviceLane {
 public:
  explicit DeviceLane(DeviceLaneOptions options);
  // Ends well if the lane is idle: the others' must, too. Leaves behind what is stuck.
  ~DeviceLane();
  DeviceLane(const DeviceLane&) = delete;
  DeviceLane& operator=(const DeviceLane&) = delete;

  // Queues a group. `rendezvous`: that of the set, with the set's first group here, else null.
  // `rows`: of a group whose members have to tell them, else null.
  void Start(GroupTaskPtr group, RendezvousPtr rendezvous, ToldRowsPtr rows);
  // Queues a group that the host reduces.
  void StartBounce(GroupTaskPtr group, HostBouncePtr bounce);
  void RemoveSet(core::SetNumber set);

  // True when all groups have left the device, or have been given up and on_failure has returned.
  bool Idle() const;
  std::vector<core::RunningOperation> Running() const;
  void Abandon(const core::Status& why);

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace sirtaki::ops::nccl
