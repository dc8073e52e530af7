// What the lane of a GPU does for one task: a group that is launched, a set that goes.
#include <algorithm>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "core/protocol/mismatch.h"
#include "ops/nccl/device_lane_impl.h"

namespace sirtaki::ops::nccl {

using core::Status;
using core::StatusCode;

namespace {

// What ranks tell each other on the device: for hundreds of ranks and tensors.
constexpr std::int64_t kUsualPinned = std::int64_t{64} << 10;
// Staging memory that a set has from the start: the world's is for buckets.
constexpr std::int64_t kLeastStaging = std::int64_t{1} << 20;
constexpr std::int64_t kMostStaging = std::int64_t{64} << 20;

std::int64_t UsualStaging(const GroupTask& group) {
  if (group.channel.set != core::kWorldSet) return kLeastStaging;
  return std::clamp(group.limits.bucket_bytes, kLeastStaging, kMostStaging);
}

}  // namespace

Status DeviceLane::Impl::Prepare() {
  if (pinned != nullptr) return Status::Ok();
  const std::shared_ptr<cuda::Device>& device = options.device;
  Status status = device->Adopt();
  // The stream first: it makes the thread's context, which kernels need; before CUDA 12 choosing a
  // device does not.
  if (status.ok()) status = cuda::Stream::Make(device, &stream);
  // A communicator is refused where there are no kernels.
  if (status.ok() && options.kernels != nullptr) {
    status = cuda::Kernels::Load(device, options.kernels, &kernels);
  }
  if (!status.ok()) return status;
  events = std::make_unique<cuda::EventPool>(device);
  auto pages = std::make_unique<PinnedMemory>(device->api());
  void* memory = nullptr;
  status = pages->Reserve(kUsualPinned, &memory);
  if (status.ok()) pinned = std::move(pages);
  return status;
}

Status DeviceLane::Impl::Await(const std::function<Status(bool* over)>& over) {
  core::Duration wait = kFirstPause;
  for (;;) {
    bool is_over = false;
    Status status = over(&is_over);
    if (!status.ok() || is_over) return status;
    if (stopped()) {
      return {StatusCode::kAborted, "the lane was stopped"};
    }
    if (status = Retire(); !status.ok()) return status;
    std::this_thread::sleep_for(wait);
    wait = std::min<core::Duration>(2 * wait, kLongestAwait);
  }
}

Status DeviceLane::Impl::AwaitEvent(const cuda::Event& event) {
  return Await([&event](bool* over) { return event.Poll(over); });
}

Status DeviceLane::Impl::AwaitStream() {
  cuda::EventPtr event;
  Status status = events->Mark(stream->handle(), &event);
  return status.ok() ? AwaitEvent(*event) : status;
}

Status DeviceLane::Impl::AwaitDrained() {
  return Await([this](bool* over) {
    *over = in_flight.empty();
    return Status::Ok();
  });
}

// The hosts of all members are waited for, but no device.
Status DeviceLane::Impl::AwaitTold(const core::HandleState& told) {
  const Status status = Await([&told](bool* over) {
    *over = told.done();
    return Status::Ok();
  });
  return status.ok() ? told.status() : status;
}

Status DeviceLane::Impl::Meet(const DeviceTask& task) {
  Rendezvous& rendezvous = *task.rendezvous;
  if (Status status = AwaitTold(*rendezvous.told); !status.ok()) return status;
  const GroupTask& group = *task.group;
  const std::string set =
      task.set == core::kWorldSet ? "the world" : "process set " + std::to_string(task.set);
  return sets.Make(task.set, rendezvous, *group.members, group.rank,
                   {.stream = *stream,
                    .choices = {.name = "sirtaki, " + set + ", GPU slot " +
                                        std::to_string(group.signature().slot),
                                .ranks = core::RanksText(*group.members),
                                .max_ctas = options.max_ctas,
                                .cta_policy = options.cta_policy},
                    .usual_bytes = UsualStaging(group),
                    .direct = options.direct ? options.device : nullptr,
                    .patience = patience()});
}

Status DeviceLane::Impl::Launch(const DeviceTask& task, cuda::EventPtr* inputs) {
  SetCommunicators::Parts* const parts = sets.Find(task.set);
  if (parts == nullptr) {
    return {StatusCode::kProtocol, "its set has no communicator on this device"};
  }
  if (task.rows != nullptr) {
    if (Status status = AwaitTold(*task.rows->told); !status.ok()) return status;
    task.rows->exchange.TakeFrom(task.rows->all);
  }
  const LaunchContext context{.stream = *stream,
                              .events = *events,
                              .kernels = *kernels,
                              .communicator = *parts->communicator,
                              .api = options.communicators->api(),
                              .staging = *parts->staging,
                              .arenas = *parts->arenas,
                              .host = *pinned,
                              .registers_arenas = options.registers_arenas,
                              .patience = patience(),
                              .await = [this](const cuda::Event& e) { return AwaitEvent(e); },
                              .drained = [this] { return AwaitDrained(); },
                              .rows = task.rows != nullptr ? &task.rows->exchange : nullptr,
                              .inputs = options.observer != nullptr ? inputs : nullptr};
  return LaunchGroup(context, *task.group);
}

Status DeviceLane::Impl::MarkEnd(InFlight launched) {
  Status status = events->Mark(stream->handle(), &launched.done);
  if (!status.ok()) return status;
  for (const GroupItem& item : launched.group->items) {
    if (item.work != nullptr) cuda::AsDeviceWork(*item.work).done = launched.done;
  }
  in_flight.push_back(std::move(launched));
  return status;
}

Status DeviceLane::Impl::Remove(core::SetNumber set) {
  Status status = sets.Find(set) != nullptr ? AwaitDrained() : Status::Ok();
  return status.ok() ? sets.Remove(set, patience()) : status;
}

Status DeviceLane::Impl::Do(const DeviceTask& task, Status* verdict) {
  in_call = task.in;
  Status status = Prepare();
  if (task.group == nullptr) return status.ok() ? Remove(task.set) : status;
  GroupTrace trace(options.observer, *task.group, core::trace::Track::kDevice);
  cuda::EventPtr inputs;
  if (status.ok() && task.rendezvous != nullptr) status = Meet(task);
  if (status.ok() && task.bounce != nullptr) {
    status = BounceThroughHost(*task.group, *task.bounce);
  } else if (status.ok()) {
    *verdict = sets.WhyRefused(task.set);
    if (!verdict->ok()) return status;
    status = Launch(task, &inputs);
  }
  if (!status.ok()) return status;
  return MarkEnd({.number = task.number,
                  .group = task.group,
                  .done = nullptr,
                  .inputs = std::move(inputs),
                  .inputs_at = {},
                  .trace = std::move(trace),
                  .carrier = task.bounce != nullptr ? "host" : "nccl"});
}

}  // namespace sirtaki::ops::nccl
