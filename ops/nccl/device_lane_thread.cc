// The thread of a GPU's lane: from one task to the next, what has left the device meanwhile, and
// how it ends.
#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "ops/base/keep_forever.h"
#include "ops/nccl/device_lane_impl.h"

namespace sirtaki::ops::nccl {

using core::Status;
using core::StatusCode;

namespace {

// The time between questions for errors of what is under way.
constexpr auto kWatch = std::chrono::milliseconds(20);
// How long the end of a lane that has failed waits for its stream.
constexpr auto kThroughLimit = std::chrono::milliseconds(250);
// How long the end of the lane waits for streams that may read an arena.
constexpr auto kFreeLimit = std::chrono::seconds(1);

}  // namespace

std::optional<DeviceTask> DeviceLane::Impl::Next() {
  core::MutexLock lock(mutex);
  if (stopped()) return std::nullopt;
  if (queue.empty() && !quits()) {
    const core::TimePoint until =
        in_flight.empty() ? core::TimePoint::max() : core::Clock::now() + pause;
    WaitUntil(until);
    pause = std::min<core::Duration>(2 * pause, kLongestPause);
  }
  if (queue.empty() || stopped()) return std::nullopt;
  pause = kFirstPause;
  DeviceTask task = std::move(queue.front());
  queue.pop_front();
  return task;
}

Status DeviceLane::Impl::SeeInputs(InFlight& group) {
  if (group.inputs == nullptr) return Status::Ok();
  bool reached = false;
  Status status = group.inputs->Poll(&reached);
  if (!reached) return status;
  group.inputs.reset();
  group.inputs_at = core::Clock::now();
  return status;
}

// The device takes one group after the other.
void DeviceLane::Impl::TellEnd(InFlight& over) {
  if (!over.trace.on()) return;
  const core::TimePoint turn = std::max(over.trace.begin(), retired);
  const core::TimePoint begin = std::max(turn, over.inputs_at);
  if (begin > turn) over.trace.Awaited(turn, begin);
  retired = core::Clock::now();
  over.trace.Moved(over.carrier, begin, retired);
  over.trace.Finish(turn);
}

Status DeviceLane::Impl::Retire() {
  bool moved = false;
  while (!in_flight.empty()) {
    bool reached = false;
    Status status = SeeInputs(in_flight.front());
    if (status.ok()) status = in_flight.front().done->Poll(&reached);
    if (!status.ok()) return status;
    if (!reached) break;
    TellEnd(in_flight.front());
    Finish(in_flight.front().number);
    in_flight.pop_front();
    moved = true;
  }
  if (moved && options.on_progress) CallOut(options.on_progress);
  const core::TimePoint now = core::Clock::now();
  if (now - watched < kWatch) return Status::Ok();
  watched = now;
  frees->Free();
  return sets.CheckAsync();
}

// What the program's streams still read comes free soon, or stays.
void DeviceLane::Impl::FreeArenas() {
  const core::TimePoint limit = core::Clock::now() + kFreeLimit;
  while (!frees->Free() && core::Clock::now() < limit) std::this_thread::sleep_for(kLongestPause);
  frees->Close();
}

void DeviceLane::Impl::EndWell() {
  if (!sets.FinalizeAll(patience()).ok()) options.communicators->AbortAll(options.device);
  FreeArenas();
  FreeOwn();
}

// Pinned memory goes on this thread, whose device it is.
void DeviceLane::Impl::FreeOwn() {
  pinned.reset();
  events.reset();
  kernels.reset();
  stream.reset();
}

// The device may write to what was launched until the communicators are aborted, and after an error
// of its own for ever.
void DeviceLane::Impl::EndBadly(GroupTaskPtr concerned) {
  const bool aborted = options.communicators->AbortAll(options.device);
  const bool is_through =
      aborted && stream != nullptr && cuda::ComesToItsEnd(*stream, *events, kThroughLimit);
  const bool goes = is_through && CallOut([&] {  // the program's tensors
                      concerned.reset();
                      in_flight.clear();
                    });
  if (!goes) return LeaveAll(std::move(concerned));
  sets.LeaveArenas();
  frees->Close();
  FreeOwn();
}

void DeviceLane::Impl::LeaveAll(GroupTaskPtr concerned) {
  KeepForever(std::const_pointer_cast<GroupTask>(concerned));
  KeepForever(std::make_shared<std::deque<InFlight>>(std::move(in_flight)));
  in_flight.clear();
  if (stream != nullptr) stream->LeaveBehind();
  sets.LeaveAll();
  frees->Close();
  KeepForever(std::shared_ptr<PinnedMemory>(std::move(pinned)));
}

void DeviceLane::Impl::RunLane() {
  Status status;
  GroupTaskPtr concerned;
  for (bool goes_on = true; goes_on;) {
    if (std::optional<DeviceTask> task = Next()) {
      concerned = task->group;
      Status verdict;
      // What allocates the outputs may throw, and memory may be short anywhere.
      status = core::OrThrown([&] { return Do(*task, &verdict); });
      // Launched: the rest is a matter of the streams.
      if (status.ok()) CallOut([&] { Tell(*task, verdict); });
    }
    if (status.ok()) {
      if (!in_flight.empty()) concerned = in_flight.front().group;
      status = core::OrThrown([this] { return Retire(); });
    }
    if (status.ok() && in_flight.empty()) concerned.reset();
    core::MutexLock lock(mutex);
    goes_on = status.ok() && !stopped() && !(quits() && queue.empty() && in_flight.empty());
  }
  const bool gone = stream != nullptr && stream->IsGone();
  if (!status.ok()) {
    CallOut([&] {
      if (gone) return Stop({StatusCode::kShutDown, status.message()}, std::nullopt);
      if (concerned == nullptr) return Stop(status, "");
      const LaneTask task{concerned, nullptr};
      Stop(task.Describe(status), task.TensorName());
    });
  }
  if (gone) {
    LeaveAll(std::move(concerned));
  } else if (stopped()) {
    EndBadly(std::move(concerned));
  } else {
    EndWell();
  }
}

void DeviceLane::Impl::Tell(const DeviceTask& task, const Status& verdict) {
  if (task.group != nullptr) {
    const LaneTask lane_task{task.group, nullptr};
    task.group->Complete(verdict.ok() ? verdict : lane_task.Describe(verdict));
    if (verdict.ok()) return;  // it retires when the device is through with it
  }
  // After the handles: who finds the lane idle finds them complete.
  Finish(task.number);
  if (options.on_progress) options.on_progress();
}

}  // namespace sirtaki::ops::nccl
