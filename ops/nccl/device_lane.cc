#include "ops/nccl/device_lane.h"

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "ops/base/keep_forever.h"
#include "ops/nccl/device_lane_impl.h"

namespace sirtaki::ops::nccl {

using core::Status;
using core::StatusCode;

namespace {

// How long the destructor waits for the thread before it is left behind.
constexpr auto kGrace = std::chrono::seconds(1);
// The same where nothing has failed: NCCL's good-bye.
constexpr auto kGoodBye = std::chrono::seconds(5);

}  // namespace

std::vector<core::RunningOperation> DeviceLane::Impl::RunningOf(
    const std::map<std::uint64_t, Task>& tasks) {
  std::vector<core::RunningOperation> operations;
  for (const auto& [number, task] : tasks) {
    if (task.group != nullptr) operations.push_back(LaneTask{task.group, nullptr}.Running());
  }
  return operations;
}

void DeviceLane::Impl::Enqueue(Task task) {
  Status refused;
  {
    core::MutexLock lock(mutex);
    refused = why;
    if (refused.ok()) {
      task.number = next_number++;
      unfinished.emplace(task.number, task);
      queue.push_back(task);
      changed.NotifyAll();
    }
  }
  if (!refused.ok() && task.group != nullptr) CompleteAll(task.group->items, refused);
}

void DeviceLane::Impl::Stop(const Status& reason, const std::optional<std::string>& tensor) {
  std::map<std::uint64_t, Task> dropped;
  {
    core::MutexLock lock(mutex);
    if (stopped.load(std::memory_order_relaxed)) return;
    stopped.store(true, std::memory_order_relaxed);
    why = reason;
    dropped = unfinished;
    stopped_in = RunningOf(dropped);
    queue.clear();
    changed.NotifyAll();
  }
  // The task first: who finds its handle failed, or the lane idle, must find the fault as well.
  // And before the abort, by which groups whose handles are ok come to their end with garbage.
  if (tensor && options.on_failure) options.on_failure(reason, *tensor);
  {
    core::MutexLock lock(mutex);
    unfinished.clear();
  }
  // Abandon leaves it to the lane's thread, whose communicators they are.
  if (tensor) sets.AbortAll();
  for (const auto& [number, task] : dropped) {
    if (task.group != nullptr) CompleteAll(task.group->items, reason);
  }
}

DeviceLane::DeviceLane(DeviceLaneOptions options)
    : impl_(std::make_shared<Impl>(std::move(options))) {
  // The thread keeps what it uses, whatever becomes of this object.
  impl_->thread = std::thread([impl = impl_] { impl->RunLane(); });
}

DeviceLane::~DeviceLane() {
  if (!Idle()) Abandon({StatusCode::kShutDown, "the session has ended"});
  bool gone = false;
  {
    core::MutexLock lock(impl_->mutex);
    impl_->quit = true;
    impl_->changed.NotifyAll();
    const bool ends_well = !impl_->stopped.load(std::memory_order_relaxed);
    const core::TimePoint limit = core::Clock::now() + (ends_well ? kGoodBye : kGrace);
    while (impl_->thread_state != Impl::ThreadState::kGone) {
      if (!impl_->calling_out && core::Clock::now() >= limit) break;
      impl_->changed.WaitUntil(impl_->mutex, impl_->calling_out ? core::TimePoint::max() : limit);
    }
    gone = impl_->thread_state == Impl::ThreadState::kGone;
    impl_->left = !gone;
  }
  if (gone) {
    impl_->thread.join();
  } else {
    impl_->thread.detach();
    KeepForever(impl_);
  }
}

void DeviceLane::Start(GroupTaskPtr group, RendezvousPtr rendezvous, std::shared_ptr<const Api> api,
                       HostBouncePtr bounce) {
  const core::SetNumber set = group->channel.set;
  impl_->Enqueue({.group = std::move(group),
                  .set = set,
                  .rendezvous = std::move(rendezvous),
                  .api = std::move(api),
                  .bounce = std::move(bounce)});
}

void DeviceLane::StartBounce(GroupTaskPtr group, HostBouncePtr bounce) {
  const core::SetNumber set = group->channel.set;
  impl_->Enqueue({.group = std::move(group), .set = set, .bounce = std::move(bounce)});
}

void DeviceLane::RemoveSet(core::SetNumber set) { impl_->Enqueue({.set = set}); }

bool DeviceLane::Idle() const {
  core::MutexLock lock(impl_->mutex);
  return impl_->unfinished.empty();
}

std::vector<core::RunningOperation> DeviceLane::Running() const {
  core::MutexLock lock(impl_->mutex);
  return impl_->stopped.load(std::memory_order_relaxed) ? impl_->stopped_in
                                                        : Impl::RunningOf(impl_->unfinished);
}

void DeviceLane::Abandon(const Status& why) {
  impl_->Stop(why.ok() ? Status(StatusCode::kAborted, "abandoned") : why, std::nullopt);
}

}  // namespace sirtaki::ops::nccl
