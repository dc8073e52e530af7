// Messages of tensors on a GPU. Large ones go by NCCL where the other side is on a GPU as well and the
// two have come to a pair (ops/nccl/message_pair). The others go through pinned memory of the host:
// there they are messages like any other.
//
//   send:     device -> pinned, behind the tensor's event; the host sends when the copy is there
//   receive:  the host receives; pinned -> device; whoever uses the tensor waits for the copy
//
// The copies have streams of their own: neither waits for collectives, nor one way for the other.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/engine/executor.h"
#include "core/engine/work.h"
#include "ops/host/p2p.h"
#include "ops/nccl/message_pair.h"

namespace sirtaki::ops::nccl {

struct DeviceP2pOptions {
  PairOptions pairs;  // with the device, in any case
  // Messages of at least that many bytes may go by NCCL.
  std::int64_t least_direct_bytes = 0;
  int rank = 0;
  // A copy failed: called once, from its own thread.
  std::function<void(const core::Status& why, const std::string& tensor)> on_failure;
  // The memory of a message is there (rings the engine's doorbell).
  std::function<void()> on_progress;
};

// Messages of one device. The class is thread-safe; nothing in it blocks except the destructor. No
// lock is held while a callback, a handle or CUDA is called. The handle of a send completes when
// the host has sent it, that of a receive when the copy to the device is launched, and those of a
// message by NCCL when that is launched; the tensors are kept until the device is through. The first
// failure, or Abandon, completes every handle with that status. The callbacks are not called after the
// destructor.
class DeviceP2p {
 public:
  // The host's part of a message: for HostLanes::StartP2p.
  struct HostPart {
    core::WorkPtr work;  // null: it has failed here
    P2pGate there;
    std::shared_ptr<P2pCarrier> carrier;  // null: it goes through the host
  };

  explicit DeviceP2p(DeviceP2pOptions options);
  // After the host lanes, which complete what they still have: so do the messages here. Leaves
  // behind what is stuck.
  ~DeviceP2p();
  DeviceP2p(const DeviceP2p&) = delete;
  DeviceP2p& operator=(const DeviceP2p&) = delete;

  // `work`: a cuda::DeviceWork on the device, of kind kSend or kReceive.
  HostPart Start(core::WorkPtr work, core::TimePoint now);
  // Running lists what goes by NCCL and is not launched. The host lists the rest; what is launched has
  // ended for the program, and holds up no session's end.
  std::vector<core::RunningOperation> Running() const;
  void Abandon(const core::Status& why);

 private:
  struct Impl;
  const std::shared_ptr<Impl> impl_;
};

}  // namespace sirtaki::ops::nccl
