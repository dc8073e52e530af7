#include "ops/nccl/device_lane.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <map>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "core/thread_annotations.h"
#include "ops/keep_forever.h"
#include "ops/nccl/group_launch.h"
#include "ops/nccl/set_communicators.h"

namespace sirtaki::ops::nccl {
namespace {

using core::Status;
using core::StatusCode;

// Between looks at the device.
constexpr auto kFirstPause = std::chrono::microseconds(20);
constexpr auto kLongestPause = std::chrono::milliseconds(1);
// Between questions for errors of what is under way.
constexpr auto kWatch = std::chrono::milliseconds(20);
// How long the destructor waits for the thread before it is left behind.
constexpr auto kGrace = std::chrono::seconds(1);
// The same where nothing has failed: NCCL's good-bye.
constexpr auto kGoodBye = std::chrono::seconds(5);

}  // namespace

struct DeviceLane::Impl {
  struct Task {
    std::uint64_t number = 0;
    GroupTaskPtr group;  // null: the set goes
    core::SetNumber set = 0;
    MeetingPtr meeting;
    std::shared_ptr<const Api> api;
    HostPassagePtr passage;
  };
  struct InFlight {
    std::uint64_t number = 0;
    GroupTaskPtr group;
    cuda::EventPtr done;
    cuda::EventPtr inputs;      // null: none, or seen
    core::TimePoint inputs_at;  // when they were seen to be there
    GroupTrace trace;
    std::string_view carrier;
  };
  enum class ThreadState : std::uint8_t { kRunning, kGone };

  explicit Impl(DeviceLaneOptions lane_options)
      : options(std::move(lane_options)), sets(options.device->api()) {}

  static std::vector<core::RunningOperation> RunningOf(const std::map<std::uint64_t, Task>& tasks);

  // ---- by anyone ----
  void Enqueue(Task task) SIRTAKI_EXCLUDES(mutex);
  // Ends the lane, once. `tensor`: whose failure it is, from the lane's thread; none for Abandon.
  void Stop(const Status& reason, const std::optional<std::string>& tensor) SIRTAKI_EXCLUDES(mutex);

  // ---- the lane's thread ----
  void RunLane() SIRTAKI_EXCLUDES(mutex);
  Status Prepare();  // the device
  std::optional<Task> Next() SIRTAKI_EXCLUDES(mutex);
  // `verdict`: what the task's handles complete with if this is ok.
  Status Do(const Task& task, Status* verdict) SIRTAKI_EXCLUDES(mutex);
  Status DoOrThrown(const Task& task, Status* verdict) SIRTAKI_EXCLUDES(mutex);
  Status Launch(const GroupTaskPtr& group, cuda::EventPtr* inputs);
  Status MarkEnd(InFlight launched);
  Status Meet(const Task& task);
  Status Remove(core::SetNumber set);
  // What has left the device, and what went wrong on the way. Fails if something did.
  Status Retire() SIRTAKI_EXCLUDES(mutex);
  static Status SeeInputs(InFlight& group);
  void TellEnd(InFlight& over);
  // Polls, tending the rest, until `over` says so or the lane is stopped.
  Status Await(const std::function<Status(bool* over)>& over) SIRTAKI_EXCLUDES(mutex);
  Status AwaitEvent(const cuda::Event& event);
  // The process exits, and CUDA's own end has come before ours.
  bool CudaHasGone() const;
  void EndWell();
  void EndBadly();
  void LeaveAll();
  // Unless the destructor has left: then nothing outside may be called.
  void CallOut(const std::function<void()>& call) SIRTAKI_EXCLUDES(mutex);
  void Tell(const Task& task, const Status& verdict) SIRTAKI_EXCLUDES(mutex);
  Patience patience() const { return {options.limit, &stopped}; }

  const DeviceLaneOptions options;
  std::atomic<bool> stopped{false};  // set under the mutex

  // Of the lane's thread.
  std::unique_ptr<cuda::Stream> stream;
  std::unique_ptr<cuda::EventPool> events;
  std::unique_ptr<cuda::Kernels> kernels;
  std::unique_ptr<PinnedMemory> pinned;
  SetCommunicators sets;
  std::deque<InFlight> in_flight;  // oldest first, as the stream has them
  core::TimePoint watched{};
  core::TimePoint retired{};  // when the last group was seen to be through
  core::Duration pause = kFirstPause;

  mutable core::Mutex mutex;
  core::CondVar changed;
  Status why SIRTAKI_GUARDED_BY(mutex);
  std::uint64_t next_number SIRTAKI_GUARDED_BY(mutex) = 0;
  std::map<std::uint64_t, Task> unfinished SIRTAKI_GUARDED_BY(mutex);
  std::vector<core::RunningOperation> stopped_in SIRTAKI_GUARDED_BY(mutex);  // what it did then
  std::deque<Task> queue SIRTAKI_GUARDED_BY(mutex);
  ThreadState thread_state SIRTAKI_GUARDED_BY(mutex) = ThreadState::kRunning;
  bool calling_out SIRTAKI_GUARDED_BY(mutex) = false;
  bool quit SIRTAKI_GUARDED_BY(mutex) = false;  // the destructor has begun
  bool left SIRTAKI_GUARDED_BY(mutex) = false;  // and has gone without the thread
  std::thread thread;                           // the constructor's and the destructor's
};

// ---- by anyone ----

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
    dropped.swap(unfinished);
    stopped_in = RunningOf(dropped);
    queue.clear();
    changed.NotifyAll();
  }
  // The task first: who finds its handle failed must find the fault as well.
  // And before the abort, by which groups whose handles are ok come to their end with garbage.
  if (tensor && options.on_failure) options.on_failure(reason, *tensor);
  // Abandon leaves it to the lane's thread, whose communicators they are.
  if (tensor) sets.AbortAll();
  for (const auto& [number, task] : dropped) {
    if (task.group != nullptr) CompleteAll(task.group->items, reason);
  }
}

// ---- the lane's thread ----

Status DeviceLane::Impl::Prepare() {
  if (pinned != nullptr) return Status::Ok();
  const std::shared_ptr<cuda::Device>& device = options.device;
  Status status = device->Adopt();
  // The stream first: it makes the thread's context, which kernels need; before CUDA 12 choosing a
  // device does not.
  if (status.ok()) status = cuda::Stream::Make(device, &stream);
  // Without kernels a communicator is refused.
  if (status.ok() && options.kernels != nullptr) {
    status = cuda::Kernels::Load(device, options.kernels, &kernels);
  }
  if (!status.ok()) return status;
  events = std::make_unique<cuda::EventPool>(device);
  pinned = std::make_unique<PinnedMemory>(device->api());
  return status;
}

std::optional<DeviceLane::Impl::Task> DeviceLane::Impl::Next() {
  core::MutexLock lock(mutex);
  if (stopped.load(std::memory_order_relaxed)) return std::nullopt;
  if (queue.empty() && !quit) {
    const core::TimePoint until =
        in_flight.empty() ? core::TimePoint::max() : core::Clock::now() + pause;
    changed.WaitUntil(mutex, until);
    pause = std::min<core::Duration>(2 * pause, kLongestPause);
  }
  if (queue.empty() || stopped.load(std::memory_order_relaxed)) return std::nullopt;
  pause = kFirstPause;
  Task task = std::move(queue.front());
  queue.pop_front();
  return task;
}

Status DeviceLane::Impl::Await(const std::function<Status(bool* over)>& over) {
  core::Duration wait = kFirstPause;
  for (;;) {
    bool is_over = false;
    Status status = over(&is_over);
    if (!status.ok() || is_over) return status;
    if (stopped.load(std::memory_order_relaxed)) {
      return {StatusCode::kAborted, "the lane was stopped"};
    }
    if (status = Retire(); !status.ok()) return status;
    std::this_thread::sleep_for(wait);
    wait = std::min<core::Duration>(2 * wait, kLongestPause);
  }
}

Status DeviceLane::Impl::AwaitEvent(const cuda::Event& event) {
  return Await([&event](bool* over) { return event.Poll(over); });
}

Status DeviceLane::Impl::Meet(const Task& task) {
  Meeting& meeting = *task.meeting;
  Status status = Await([&](bool* over) {
    *over = meeting.told->done();
    return Status::Ok();
  });
  if (status.ok()) status = meeting.told->status();
  if (!status.ok()) return status;
  return sets.Make(task.set, meeting, task.group->members, task.group->rank, task.api, patience());
}

Status DeviceLane::Impl::Launch(const GroupTaskPtr& group, cuda::EventPtr* inputs) {
  SetCommunicators::Parts* const parts = sets.Find(group->channel.set);
  if (parts == nullptr) {
    return {StatusCode::kProtocol, "its set has no communicator on this device"};
  }
  const LaunchContext context{.stream = *stream,
                              .events = *events,
                              .kernels = *kernels,
                              .communicator = *parts->communicator,
                              .staging = *parts->staging,
                              .host = *pinned,
                              .patience = patience(),
                              .await = [this](const cuda::Event& e) { return AwaitEvent(e); },
                              .inputs = options.observer != nullptr ? inputs : nullptr};
  return LaunchGroup(context, *group);
}

Status DeviceLane::Impl::MarkEnd(InFlight launched) {
  Status status = events->Take(&launched.done);
  if (status.ok()) status = launched.done->Record(stream->handle());
  if (!status.ok()) return status;
  for (const core::RunItem& item : launched.group->items) {
    if (item.work != nullptr) cuda::AsDeviceWork(*item.work).done = launched.done;
  }
  in_flight.push_back(std::move(launched));
  return status;
}

Status DeviceLane::Impl::Remove(core::SetNumber set) {
  const bool is_used = sets.Find(set) != nullptr;
  Status status = Await([this, is_used](bool* over) {
    *over = !is_used || in_flight.empty();
    return Status::Ok();
  });
  return status.ok() ? sets.Remove(set, patience()) : status;
}

Status DeviceLane::Impl::Do(const Task& task, Status* verdict) {
  Status status = Prepare();
  if (task.group == nullptr) return status.ok() ? Remove(task.set) : status;
  GroupTrace trace(options.observer, *task.group, core::trace::Track::kDevice);
  cuda::EventPtr inputs;
  if (status.ok() && task.meeting != nullptr) status = Meet(task);
  if (status.ok() && task.passage != nullptr) {
    const PassageContext context{
        .stream = *stream, .events = *events, .host = *pinned, .await = [this](const auto& over) {
          return Await(over);
        }};
    status = PassThroughHost(context, *task.group, *task.passage);
  } else if (status.ok()) {
    *verdict = sets.WhyRefused(task.set);
    if (!verdict->ok()) return status;
    status = Launch(task.group, &inputs);
  }
  if (!status.ok()) return status;
  return MarkEnd({.number = task.number,
                  .group = task.group,
                  .done = nullptr,
                  .inputs = std::move(inputs),
                  .inputs_at = {},
                  .trace = std::move(trace),
                  .carrier = task.passage != nullptr ? "host" : "nccl"});
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

// What allocates the outputs may throw, and memory may be short anywhere.
Status DeviceLane::Impl::DoOrThrown(const Task& task, Status* verdict) {
  try {
    return Do(task, verdict);
  } catch (const std::bad_alloc&) {
    return {StatusCode::kBackend, "out of memory"};
  } catch (const std::exception& error) {
    return {StatusCode::kBackend, error.what()};
  } catch (...) {
    return {StatusCode::kBackend, "an exception of unknown type"};
  }
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
    {
      core::MutexLock lock(mutex);
      unfinished.erase(in_flight.front().number);
    }
    in_flight.pop_front();
    moved = true;
  }
  if (moved && options.on_progress) CallOut(options.on_progress);
  const core::TimePoint now = core::Clock::now();
  if (now - watched < kWatch) return Status::Ok();
  watched = now;
  return sets.CheckAsync();
}

bool DeviceLane::Impl::CudaHasGone() const {
  int capture = 0;
  return stream != nullptr && options.device->api().StreamIsCapturing(stream->handle(), &capture) ==
                                  cuda::Error::kDeinitialized;
}

void DeviceLane::Impl::EndWell() {
  sets.FinalizeAll(patience());
  // On this thread, whose device it is.
  pinned.reset();
  events.reset();
  kernels.reset();
  stream.reset();
}

// The device may write to what was launched until the communicators are aborted, and after an error
// of its own for ever.
void DeviceLane::Impl::EndBadly() {
  sets.AbortAll();
  LeaveAll();
}

void DeviceLane::Impl::LeaveAll() {
  KeepForever(std::make_shared<std::deque<InFlight>>(std::move(in_flight)));
  in_flight.clear();
  if (stream != nullptr) stream->LeaveBehind();
  sets.LeaveAll();
  KeepForever(std::shared_ptr<PinnedMemory>(std::move(pinned)));
}

void DeviceLane::Impl::CallOut(const std::function<void()>& call) {
  {
    core::MutexLock lock(mutex);
    if (left) return;
    calling_out = true;
  }
  call();
  core::MutexLock lock(mutex);
  calling_out = false;
  changed.NotifyAll();
}

void DeviceLane::Impl::RunLane() {
  Status status;
  GroupTaskPtr concerned;
  for (bool goes_on = true; goes_on;) {
    if (std::optional<Task> task = Next()) {
      concerned = task->group;
      Status verdict;
      status = DoOrThrown(*task, &verdict);
      // Launched: the rest is a matter of the streams.
      if (status.ok()) CallOut([&] { Tell(*task, verdict); });
    }
    if (status.ok()) {
      if (!in_flight.empty()) concerned = in_flight.front().group;
      status = Retire();
    }
    if (status.ok() && in_flight.empty()) concerned.reset();
    core::MutexLock lock(mutex);
    goes_on = status.ok() && !stopped.load(std::memory_order_relaxed) &&
              !(quit && queue.empty() && in_flight.empty());
  }
  const bool gone = CudaHasGone();
  if (!status.ok()) {
    KeepForever(std::const_pointer_cast<GroupTask>(concerned));
    CallOut([&] {
      if (gone) return Stop({StatusCode::kShutDown, status.message()}, std::nullopt);
      if (concerned == nullptr) return Stop(status, "");
      const LaneTask task{concerned, nullptr};
      Stop(task.Describe(status), task.TensorName());
    });
  }
  if (gone) {
    LeaveAll();
  } else if (stopped.load(std::memory_order_relaxed)) {
    EndBadly();
  } else {
    EndWell();
  }
  core::MutexLock lock(mutex);
  thread_state = ThreadState::kGone;
  changed.NotifyAll();
}

void DeviceLane::Impl::Tell(const Task& task, const Status& verdict) {
  if (task.group != nullptr) {
    const LaneTask lane_task{task.group, nullptr};
    CompleteAll(task.group->items, verdict.ok() ? verdict : lane_task.Describe(verdict));
    if (verdict.ok()) return;  // it retires when the device is through with it
  }
  // After the handles: who finds the lane idle finds them complete.
  {
    core::MutexLock lock(mutex);
    unfinished.erase(task.number);
  }
  if (options.on_progress) options.on_progress();
}

// ---- the lane ----

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

void DeviceLane::Start(GroupTaskPtr group, MeetingPtr meeting, std::shared_ptr<const Api> api) {
  const core::SetNumber set = group->channel.set;
  impl_->Enqueue({.group = std::move(group),
                  .set = set,
                  .meeting = std::move(meeting),
                  .api = std::move(api)});
}

void DeviceLane::StartPassage(GroupTaskPtr group, HostPassagePtr passage) {
  const core::SetNumber set = group->channel.set;
  impl_->Enqueue({.group = std::move(group), .set = set, .passage = std::move(passage)});
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
