// What the lane of a GPU consists of. For the files that make up nccl::DeviceLane only.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"
#include "ops/groups/group_trace.h"
#include "ops/groups/lane.h"
#include "ops/nccl/arena.h"
#include "ops/nccl/device_lane.h"
#include "ops/nccl/device_memory.h"
#include "ops/nccl/group_launch.h"
#include "ops/nccl/set_communicators.h"

namespace sirtaki::ops::nccl {

// The pauses between looks at the device begin with this one.
inline constexpr auto kFirstPause = std::chrono::microseconds(20);
inline constexpr auto kLongestPause = std::chrono::milliseconds(1);
// The longest pause while the lane can do nothing else: what it waits for holds up the device.
inline constexpr auto kLongestAwait = std::chrono::microseconds(100);

struct DeviceTask {
  std::uint64_t number = 0;
  GroupTaskPtr group;  // null: the set goes
  core::SetNumber set = 0;
  RendezvousPtr rendezvous;
  HostBouncePtr bounce;
  ToldRowsPtr rows;
  // The call of NCCL that the lane waits in for it; null: in none.
  std::shared_ptr<std::atomic<const char*>> in = std::make_shared<std::atomic<const char*>>();

  void Complete(const core::Status& status) const {
    if (group != nullptr) group->Complete(status);
  }
  void AddRunning(std::vector<core::RunningOperation>* list) const {
    if (group == nullptr) return;
    list->push_back(LaneTask{group, nullptr}.Running());
    if (const char* const function = in->load(std::memory_order_relaxed)) {
      std::string& what = list->back().what;  // ends with "(GPU slot 0)"
      what.insert(what.size() - 1, std::string(", in ") + function);
    }
  }
};

struct DeviceLane::Impl : Lane<DeviceTask> {
  struct InFlight {
    std::uint64_t number = 0;
    GroupTaskPtr group;
    cuda::EventPtr done;
    cuda::EventPtr inputs;      // null: none, or seen
    core::TimePoint inputs_at;  // when they were seen to be there
    GroupTrace trace;
    std::string_view carrier;
  };

  explicit Impl(DeviceLaneOptions lane_options)
      : Lane(lane_options.on_failure),
        options(std::move(lane_options)),
        sets(options.device->api(), frees, options.communicators) {}

  // ---- by anyone ----
  // Ends the lane, once. `tensor`: whose failure it is, from the lane's thread; none for Abandon.
  void Stop(const core::Status& reason, const std::optional<std::string>& tensor)
      SIRTAKI_EXCLUDES(mutex);

  // ---- the lane's thread ----
  void RunLane() SIRTAKI_EXCLUDES(mutex);
  core::Status Prepare();  // the device
  std::optional<DeviceTask> Next() SIRTAKI_EXCLUDES(mutex);
  // `verdict`: what the task's handles complete with if this is ok.
  core::Status Do(const DeviceTask& task, core::Status* verdict) SIRTAKI_EXCLUDES(mutex);
  core::Status Launch(const DeviceTask& task, cuda::EventPtr* inputs);
  // BounceThroughHost returns when the results are in the tensors. Errors: those of CUDA, and of the
  // host's part.
  core::Status BounceThroughHost(const GroupTask& group, HostBounce& bounce);
  core::Status MarkEnd(InFlight launched);
  core::Status Meet(const DeviceTask& task);
  core::Status AwaitTold(const core::HandleState& told);
  core::Status Remove(core::SetNumber set);
  // What has left the device, and what went wrong on the way. Fails if something did.
  core::Status Retire() SIRTAKI_EXCLUDES(mutex);
  static core::Status SeeInputs(InFlight& group);
  void TellEnd(InFlight& over);
  // Polls, tending the rest, until `over` says so or the lane is stopped.
  core::Status Await(const std::function<core::Status(bool* over)>& over) SIRTAKI_EXCLUDES(mutex);
  core::Status AwaitEvent(const cuda::Event& event);
  core::Status AwaitStream();   // the device has come here
  core::Status AwaitDrained();  // nothing is in flight
  void FreeArenas();
  void EndWell();
  void FreeOwn();
  // `concerned`: the group that has failed, which was launched perhaps; null: none.
  void EndBadly(GroupTaskPtr concerned) SIRTAKI_EXCLUDES(mutex);
  void LeaveAll(GroupTaskPtr concerned);
  void Tell(const DeviceTask& task, const core::Status& verdict) SIRTAKI_EXCLUDES(mutex);
  Patience patience() const { return {options.limit, &stop(), in_call.get()}; }

  const DeviceLaneOptions options;
  const std::shared_ptr<ArenaFrees> frees = std::make_shared<ArenaFrees>();

  // The lane's thread alone uses what follows.
  std::unique_ptr<cuda::Stream> stream;
  std::unique_ptr<cuda::EventPool> events;
  std::unique_ptr<cuda::Kernels> kernels;
  std::unique_ptr<PinnedMemory> pinned;
  SetCommunicators sets;
  std::deque<InFlight> in_flight;                     // oldest first, as the stream has them
  std::shared_ptr<std::atomic<const char*>> in_call;  // of the task that is being done, or was
  core::TimePoint watched{};
  core::TimePoint retired{};  // when the last group was seen to be through
  core::Duration pause = kFirstPause;
};

}  // namespace sirtaki::ops::nccl
