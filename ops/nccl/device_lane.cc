#include "ops/nccl/device_lane.h"

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "ops/base/keep_forever.h"
#include "ops/nccl/device_lane_impl.h"

namespace sirtaki::ops::nccl {

using core::Status;
using core::StatusCode;

namespace {

// How long the destructor waits for the thread before it is left behind.
constexpr auto kGrace = std::chrono::seconds(2);
// NCCL's good-bye may take so long where nothing has failed.
constexpr auto kGoodBye = std::chrono::seconds(5);

}  // namespace

void DeviceLane::Impl::Stop(const Status& reason, const std::optional<std::string>& tensor) {
  // The failure is told before the abort, by which groups whose handles are ok come to their end with
  // garbage. The wait for it has a limit: whoever ends the lane waits for this call without one.
  // Abandon leaves the abort to the lane's thread, which a call of NCCL may keep.
  Lane::Stop(reason, tensor, [&] {
    if (tensor) {
      options.communicators->AbortAll(options.device);
    } else {
      options.communicators->StartAbortIfInCall(options.device);
    }
  });
}

DeviceLane::DeviceLane(DeviceLaneOptions options)
    : impl_(std::make_shared<Impl>(std::move(options))) {
  impl_->StartThread([impl = impl_] { impl->RunLane(); });
}

DeviceLane::~DeviceLane() {
  if (!Idle()) Abandon({StatusCode::kShutDown, "the session has ended"});
  if (!impl_->EndThread(impl_->stopped() ? kGrace : kGoodBye)) KeepForever(impl_);
}

void DeviceLane::Start(GroupTaskPtr group, RendezvousPtr rendezvous, ToldRowsPtr rows) {
  DeviceTask task{
      .set = group->channel.set, .rendezvous = std::move(rendezvous), .rows = std::move(rows)};
  task.group = std::move(group);
  impl_->Take(task);
}

void DeviceLane::StartBounce(GroupTaskPtr group, HostBouncePtr bounce) {
  DeviceTask task{.set = group->channel.set, .bounce = std::move(bounce)};
  task.group = std::move(group);
  impl_->Take(task);
}

void DeviceLane::RemoveSet(core::SetNumber set) {
  DeviceTask task{.set = set};
  impl_->Take(task);
}

bool DeviceLane::Idle() const {
  core::MutexLock lock(impl_->mutex);
  return impl_->unfinished.empty();
}

std::vector<core::RunningOperation> DeviceLane::Running() const { return impl_->Running(); }

void DeviceLane::Abandon(const Status& why) {
  impl_->Stop(why.ok() ? Status(StatusCode::kAborted, "abandoned") : why, std::nullopt);
}

}  // namespace sirtaki::ops::nccl
