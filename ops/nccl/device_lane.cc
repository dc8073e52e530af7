#include "ops/nccl/device_lane.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "core/thread_annotations.h"
#include "ops/keep_forever.h"
#include "ops/nccl/group_launch.h"

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
  };
  struct SetParts {
    std::shared_ptr<const Api> api;
    std::unique_ptr<Communicator> communicator;
    std::unique_ptr<DeviceMemory> staging;  // goes first
  };
  enum class ThreadState : std::uint8_t { kRunning, kGone };

  explicit Impl(DeviceLaneOptions lane_options) : options(std::move(lane_options)) {}

  // ---- by anyone ----
  void Enqueue(Task task) SIRTAKI_EXCLUDES(mutex);
  // Ends the lane, once. `tensor`: whose failure it is, from the lane's thread; none for Abandon.
  void Stop(const Status& reason, const std::optional<std::string>& tensor) SIRTAKI_EXCLUDES(mutex);

  // ---- the lane's thread ----
  void RunLane() SIRTAKI_EXCLUDES(mutex);
  Status Prepare();  // the device
  std::optional<Task> Next() SIRTAKI_EXCLUDES(mutex);
  Status Do(const Task& task) SIRTAKI_EXCLUDES(mutex);
  Status Launch(const GroupTaskPtr& group);
  Status MarkEnd(const GroupTaskPtr& group, std::uint64_t number);
  Status Meet(const Task& task);
  Status Remove(core::SetNumber set);
  // What has left the device, and what went wrong on the way. Fails if something did.
  Status Retire() SIRTAKI_EXCLUDES(mutex);
  // Polls, tending the rest, until `over` says so or the lane is stopped.
  Status Await(const std::function<Status(bool* over)>& over) SIRTAKI_EXCLUDES(mutex);
  Status AwaitEvent(const cuda::Event& event);
  void AbortAll();
  void EndWell();
  void EndBadly();
  // Unless the destructor has left: then nothing outside may be called.
  void CallOut(const std::function<void()>& call) SIRTAKI_EXCLUDES(mutex);
  void Tell(const Task& task) const;
  Patience patience() const { return {options.limit, &stopped}; }

  const DeviceLaneOptions options;
  std::atomic<bool> stopped{false};  // set under the mutex

  // Of the lane's thread.
  std::unique_ptr<cuda::Stream> stream;
  std::unique_ptr<cuda::EventPool> events;
  std::unique_ptr<cuda::Kernels> kernels;
  std::unique_ptr<PinnedMemory> pinned;
  std::map<core::SetNumber, SetParts> sets;
  std::deque<InFlight> in_flight;  // oldest first, as the stream has them
  core::TimePoint watched{};
  core::Duration pause = kFirstPause;

  mutable core::Mutex mutex;
  core::CondVar changed;
  Status why SIRTAKI_GUARDED_BY(mutex);
  std::uint64_t next_number SIRTAKI_GUARDED_BY(mutex) = 0;
  std::map<std::uint64_t, Task> unfinished SIRTAKI_GUARDED_BY(mutex);
  std::deque<Task> queue SIRTAKI_GUARDED_BY(mutex);
  ThreadState thread_state SIRTAKI_GUARDED_BY(mutex) = ThreadState::kRunning;
  bool calling_out SIRTAKI_GUARDED_BY(mutex) = false;
  bool quit SIRTAKI_GUARDED_BY(mutex) = false;  // the destructor has begun
  bool left SIRTAKI_GUARDED_BY(mutex) = false;  // and has gone without the thread
  std::thread thread;                           // the constructor's and the destructor's
};

// ---- by anyone ----

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
    queue.clear();
    changed.NotifyAll();
  }
  // The task first: who finds its handle failed must find the fault as well.
  // And before the abort, by which groups whose handles are ok come to their end with garbage.
  if (tensor && options.on_failure) options.on_failure(reason, *tensor);
  // Abandon leaves it to the lane's thread, whose communicators they are.
  if (tensor) AbortAll();
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
  if (status.ok()) status = Judge(meeting.all, task.group->members);
  if (!status.ok()) return status;
  SetParts parts{.api = task.api, .communicator = nullptr, .staging = nullptr};
  status = Communicator::Init(*task.api, meeting.all.front().id,
                              static_cast<int>(task.group->members.Count()),
                              static_cast<int>(task.group->members.IndexOf(task.group->rank)),
                              patience(), &parts.communicator);
  if (!status.ok()) return status;
  parts.staging = std::make_unique<DeviceMemory>(options.device->api(), *parts.communicator);
  sets[task.set] = std::move(parts);
  return Status::Ok();
}

Status DeviceLane::Impl::Launch(const GroupTaskPtr& group) {
  const auto found = sets.find(group->channel.set);
  if (found == sets.end()) {
    return {StatusCode::kProtocol, "its set has no communicator on this device"};
  }
  SetParts& parts = found->second;
  const LaunchContext context{.stream = *stream,
                              .events = *events,
                              .kernels = *kernels,
                              .communicator = *parts.communicator,
                              .staging = *parts.staging,
                              .host = *pinned,
                              .patience = patience(),
                              .await = [this](const cuda::Event& e) { return AwaitEvent(e); }};
  return LaunchGroup(context, *group);
}

Status DeviceLane::Impl::MarkEnd(const GroupTaskPtr& group, std::uint64_t number) {
  cuda::EventPtr done;
  Status status = events->Take(&done);
  if (status.ok()) status = done->Record(stream->handle());
  if (!status.ok()) return status;
  for (const core::RunItem& item : group->items) {
    if (item.work != nullptr) static_cast<cuda::DeviceWork&>(*item.work).done = done;
  }
  in_flight.push_back({number, group, std::move(done)});
  return status;
}

Status DeviceLane::Impl::Remove(core::SetNumber set) {
  const auto found = sets.find(set);
  if (found == sets.end()) return Status::Ok();  // it never used this device
  Status status = Await([this](bool* over) {
    *over = in_flight.empty();
    return Status::Ok();
  });
  if (!status.ok()) return status;
  found->second.staging.reset();
  status = found->second.communicator->Finalize(patience());
  sets.erase(found);
  return status;
}

Status DeviceLane::Impl::Do(const Task& task) {
  Status status = Prepare();
  if (task.group == nullptr) {
    if (status.ok()) status = Remove(task.set);
    if (!status.ok()) return status;
    core::MutexLock lock(mutex);
    unfinished.erase(task.number);
    return status;
  }
  if (status.ok() && task.meeting != nullptr) status = Meet(task);
  if (status.ok() && task.passage != nullptr) {
    const PassageContext context{
        .stream = *stream, .events = *events, .host = *pinned, .await = [this](const auto& over) {
          return Await(over);
        }};
    status = PassThroughHost(context, *task.group, *task.passage);
  } else if (status.ok()) {
    status = Launch(task.group);
  }
  return status.ok() ? MarkEnd(task.group, task.number) : status;
}

Status DeviceLane::Impl::Retire() {
  bool moved = false;
  while (!in_flight.empty()) {
    bool reached = false;
    Status status = in_flight.front().done->Poll(&reached);
    if (!status.ok()) return status;
    if (!reached) break;
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
  for (auto& [set, parts] : sets) {
    if (Status status = parts.communicator->CheckAsync(); !status.ok()) return status;
  }
  return Status::Ok();
}

void DeviceLane::Impl::AbortAll() {
  for (auto& [set, parts] : sets) parts.communicator->Abort();
}

void DeviceLane::Impl::EndWell() {
  for (auto& [set, parts] : sets) {
    parts.staging.reset();
    static_cast<void>(parts.communicator->Finalize(patience()));
  }
  sets.clear();
  // On this thread, whose device it is.
  pinned.reset();
  events.reset();
  kernels.reset();
  stream.reset();
}

// The device may write to what was launched until the communicators are aborted, and after an error
// of its own for ever.
void DeviceLane::Impl::EndBadly() {
  AbortAll();
  KeepForever(std::make_shared<std::deque<InFlight>>(std::move(in_flight)));
  in_flight.clear();
  if (stream != nullptr) stream->LeaveBehind();
  for (auto& [set, parts] : sets) {
    KeepForever(std::make_shared<SetParts>(std::move(parts)));
  }
  sets.clear();
  KeepForever(std::shared_ptr<PinnedMemory>(std::move(pinned)));
  KeepForever(std::shared_ptr<cuda::Kernels>(std::move(kernels)));
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
      status = Do(*task);
      // Launched: the rest is a matter of the streams.
      if (status.ok()) CallOut([&] { Tell(*task); });
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
  if (!status.ok()) {
    KeepForever(std::const_pointer_cast<GroupTask>(concerned));
    CallOut([&] {
      if (concerned == nullptr) return Stop(status, "");
      const LaneTask task{concerned, nullptr};
      Stop(task.Describe(status), task.TensorName());
    });
  }
  if (stopped.load(std::memory_order_relaxed)) {
    EndBadly();
  } else {
    EndWell();
  }
  core::MutexLock lock(mutex);
  thread_state = ThreadState::kGone;
  changed.NotifyAll();
}

void DeviceLane::Impl::Tell(const Task& task) const {
  if (task.group != nullptr) return CompleteAll(task.group->items, Status::Ok());
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
  std::vector<core::RunningOperation> operations;
  core::MutexLock lock(impl_->mutex);
  for (const auto& [number, task] : impl_->unfinished) {
    if (task.group == nullptr) continue;
    operations.push_back({task.set, task.group->ToString(), task.group->since});
  }
  return operations;
}

void DeviceLane::Abandon(const Status& why) {
  impl_->Stop(why.ok() ? Status(StatusCode::kAborted, "abandoned") : why, std::nullopt);
}

}  // namespace sirtaki::ops::nccl
