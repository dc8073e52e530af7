#include "ops/host_lanes.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/message.h"
#include "core/thread_annotations.h"
#include "ops/group_run.h"
#include "ops/keep_forever.h"
#include "ops/lane_task.h"
#include "ops/messages.h"
#include "ops/staging.h"

namespace sirtaki::ops {
namespace {

using core::Status;
using core::StatusCode;

// More small operations at once than this bring nothing, and each holds its staging memory.
constexpr std::size_t kSmallInFlight = 16;

// How long the destructor waits for an aborted operation to return before its thread is left
// behind.
constexpr auto kGrace = std::chrono::seconds(1);

// Between looks whether the inputs of a group are there.
constexpr auto kInputsPause = std::chrono::microseconds(100);

}  // namespace

struct HostLanes::Impl {
  struct Numbered {
    std::uint64_t number;
    LaneTask task;
  };
  struct InFlight {
    std::uint64_t number = 0;
    std::unique_ptr<Staging> staging;
    std::unique_ptr<GroupRun> run;
  };
  // What the large lane's thread does.
  enum class ThreadState : std::uint8_t { kNone, kWaiting, kRunning, kCallingOut, kGone };

  Impl(HostLanesOptions lane_options, Backend& lane_backend)
      : options(std::move(lane_options)),
        backend(lane_backend),
        pool(lane_backend.memory()),
        sets(options.sets),
        messages(options.rank, lane_backend) {}

  // ---- by anyone ----
  void Enqueue(const LaneTask& task) SIRTAKI_EXCLUDES(mutex);
  // It is over: completes its handles, or ends both lanes.
  void Finish(std::uint64_t number, const LaneTask& task, const Status& status)
      SIRTAKI_EXCLUDES(mutex);
  // Ends both lanes, once. `tensor`: of the failure; none for Abandon.
  void Stop(const Status& reason, const std::optional<std::string>& tensor) SIRTAKI_EXCLUDES(mutex);

  // ---- under the token ----
  bool StepSmall();
  void End(InFlight over) SIRTAKI_EXCLUDES(mutex);
  bool StepLarge() SIRTAKI_EXCLUDES(mutex);
  bool StepMessages() SIRTAKI_EXCLUDES(mutex);
  bool LargeWaits() SIRTAKI_EXCLUDES(mutex);

  // ---- the large lane's thread ----
  void RunLargeLane() SIRTAKI_EXCLUDES(mutex);
  // The next task, or none when the thread is to end.
  std::optional<Numbered> NextLarge() SIRTAKI_EXCLUDES(mutex);
  // False when the destructor has left: nothing outside may be called.
  bool BeginCallOut() SIRTAKI_EXCLUDES(mutex);

  // ---- by whoever runs the large lane ----
  // Whether the first task of the queue may begin: a set goes when its small groups have gone, a
  // group waits for its inputs.
  bool LargeIsReady() const SIRTAKI_REQUIRES(mutex);
  bool LargeAwaitsInputs() const SIRTAKI_REQUIRES(mutex);
  Status Change(const SetChange& change) SIRTAKI_EXCLUDES(mutex);

  static fusion::Cutting LargeCutting(const GroupTask& task) {
    return {.chunk_bytes = task.chunk_bytes, .direct_bytes = task.chunk_bytes};
  }

  const HostLanesOptions options;
  Backend& backend;
  std::atomic<bool> stopped{false};  // set under the mutex

  // Under the token.
  fusion::Limits limits = options.limits;
  std::int64_t chunk_bytes = options.chunk_bytes;
  std::deque<Numbered> small_queue;
  std::vector<InFlight> small;  // oldest first
  StagingPool pool;
  InFlight large;  // without a thread of its own

  mutable core::Mutex mutex;
  core::CondVar changed;
  Status why SIRTAKI_GUARDED_BY(mutex);  // stopped
  std::uint64_t next_number SIRTAKI_GUARDED_BY(mutex) = 0;
  std::map<core::SetNumber, core::RankRanges> sets SIRTAKI_GUARDED_BY(mutex);
  // Everything that is queued or runs, by number.
  std::map<std::uint64_t, LaneTask> unfinished SIRTAKI_GUARDED_BY(mutex);
  std::deque<Numbered> large_queue SIRTAKI_GUARDED_BY(mutex);
  ThreadState thread_state SIRTAKI_GUARDED_BY(mutex) = ThreadState::kNone;
  bool quit SIRTAKI_GUARDED_BY(mutex) = false;  // the destructor has begun
  bool left SIRTAKI_GUARDED_BY(mutex) = false;  // and has gone without the thread
  std::thread thread;                           // the constructor's and the destructor's

  Messages messages;  // has a lock of its own
};

void HostLanes::Impl::Enqueue(const LaneTask& task) {
  Status refused;
  {
    core::MutexLock lock(mutex);
    refused = why;
    if (refused.ok()) {
      const std::uint64_t number = next_number++;
      unfinished.emplace(number, task);
      if (task.is_small()) {
        small_queue.push_back({number, task});
      } else {
        large_queue.push_back({number, task});
        changed.NotifyAll();
      }
    }
  }
  if (!refused.ok()) task.Complete(refused);
}

void HostLanes::Impl::Finish(std::uint64_t number, const LaneTask& task, const Status& status) {
  if (!status.ok()) return Stop(task.Describe(status), task.TensorName());
  task.Complete(status);
  core::MutexLock lock(mutex);
  unfinished.erase(number);
  // A set that goes may have waited for it.
  const bool set_waits = !large_queue.empty() && large_queue.front().task.change != nullptr;
  if (task.is_small() && set_waits) changed.NotifyAll();
}

void HostLanes::Impl::Stop(const Status& reason, const std::optional<std::string>& tensor) {
  std::map<std::uint64_t, LaneTask> failed;
  {
    core::MutexLock lock(mutex);
    if (stopped.load(std::memory_order_relaxed)) return;
    stopped.store(true, std::memory_order_relaxed);
    why = reason;
    failed.swap(unfinished);
    large_queue.clear();
    changed.NotifyAll();
  }
  // The task first: who finds its handle failed must find the fault as well.
  if (tensor && options.on_failure) options.on_failure(reason, *tensor);
  // Before a program goes on with its tensors: who reads them there still has to know.
  backend.Abort(reason);
  // What runs keeps its memory: the run itself refers to its task.
  for (const auto& [number, task] : failed) task.Complete(reason);
  messages.Stop(reason);
}

// After a failure the medium may still write to what the group has given it: that stays for the
// life of the process.
void HostLanes::Impl::End(InFlight over) {
  const LaneTask task{over.run->task(), nullptr};
  const Status status = over.run->status();
  if (status.ok()) {
    over.run.reset();
    pool.Return(std::move(over.staging));
  } else {
    KeepForever(std::make_shared<InFlight>(std::move(over)));
  }
  Finish(over.number, task, status);
}

bool HostLanes::Impl::StepSmall() {
  bool moved = false;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < small.size(); ++i) {
    const Progress progress =
        stopped.load(std::memory_order_relaxed) ? Progress::kWaiting : small[i].run->Advance();
    moved |= progress != Progress::kWaiting;
    if (progress == Progress::kOver) {
      End(std::move(small[i]));
    } else {
      if (kept != i) small[kept] = std::move(small[i]);
      ++kept;
    }
  }
  small.resize(kept);

  while (!small_queue.empty() && small.size() < kSmallInFlight &&
         !stopped.load(std::memory_order_relaxed)) {
    InFlight next;
    next.number = small_queue.front().number;
    next.staging = pool.Take();
    // The whole group in one window, in staging memory: after a fault nobody writes to the tensors.
    const fusion::Cutting whole{.chunk_bytes = std::numeric_limits<std::int64_t>::max()};
    next.run =
        GroupRun::Make(small_queue.front().task.group, backend, *next.staging, whole, stopped);
    small_queue.pop_front();
    moved = true;
    if (next.run->Advance() != Progress::kOver) {
      small.push_back(std::move(next));
      continue;
    }
    End(std::move(next));
  }
  return moved;
}

bool HostLanes::Impl::StepLarge() {
  if (large.staging == nullptr) large.staging = pool.Take();
  bool moved = false;
  while (!stopped.load(std::memory_order_relaxed)) {
    if (large.run == nullptr) {
      const bool may_block = !options.flushed || options.flushed();
      Numbered next;
      {
        core::MutexLock lock(mutex);
        if (!LargeIsReady()) return moved;
        if (large_queue.front().task.change != nullptr && !may_block) return moved;
        next = std::move(large_queue.front());
        large_queue.pop_front();
      }
      if (next.task.change != nullptr) {
        Finish(next.number, next.task, Change(*next.task.change));
        moved = true;
        continue;
      }
      large.number = next.number;
      large.run = GroupRun::Make(next.task.group, backend, *large.staging,
                                 LargeCutting(*next.task.group), stopped);
    }
    const Progress progress = large.run->Advance();
    moved |= progress != Progress::kWaiting;
    if (progress != Progress::kOver) return moved;
    End(std::move(large));
    if (large.staging == nullptr) large.staging = pool.Take();
  }
  return moved;
}

bool HostLanes::Impl::StepMessages() {
  std::optional<Messages::Failure> failure;
  const bool moved = messages.Step(&failure);
  if (failure) Stop(failure->why, core::TensorName(failure->work->request.key));
  return moved;
}

bool HostLanes::Impl::LargeWaits() {
  if (large.run != nullptr) return true;
  core::MutexLock lock(mutex);
  return !large_queue.empty();
}

bool HostLanes::Impl::LargeIsReady() const {
  if (large_queue.empty() || LargeAwaitsInputs()) return false;
  const SetChangePtr& change = large_queue.front().task.change;
  if (change == nullptr || change->adds) return true;
  for (const auto& [number, task] : unfinished) {
    if (task.is_small() && task.set() == change->set) return false;
  }
  return true;
}

bool HostLanes::Impl::LargeAwaitsInputs() const {
  if (large_queue.empty() || large_queue.front().task.group == nullptr) return false;
  const auto& there = large_queue.front().task.group->inputs_there;
  return there != nullptr && !there->load(std::memory_order_acquire);
}

Status HostLanes::Impl::Change(const SetChange& change) {
  const Status status =
      change.adds ? backend.AddSet(change.set, change.members) : backend.RemoveSet(change.set);
  if (!status.ok()) return status;
  core::MutexLock lock(mutex);
  if (change.adds) {
    sets[change.set] = change.members;
  } else {
    sets.erase(change.set);
  }
  return status;
}

std::optional<HostLanes::Impl::Numbered> HostLanes::Impl::NextLarge() {
  core::MutexLock lock(mutex);
  thread_state = ThreadState::kWaiting;
  for (;;) {
    // Nobody tells when a device has brought them. Asked first: they may come between two
    // questions.
    const bool looks = LargeAwaitsInputs();
    if (LargeIsReady() || quit) break;
    changed.WaitUntil(mutex, looks ? core::Clock::now() + kInputsPause : core::TimePoint::max());
  }
  if (!LargeIsReady() || left) {
    thread_state = ThreadState::kGone;
    changed.NotifyAll();
    return std::nullopt;
  }
  Numbered next = std::move(large_queue.front());
  large_queue.pop_front();
  thread_state = ThreadState::kRunning;
  return next;
}

bool HostLanes::Impl::BeginCallOut() {
  core::MutexLock lock(mutex);
  if (left) return false;
  thread_state = ThreadState::kCallingOut;
  return true;
}

void HostLanes::Impl::RunLargeLane() {
  // In memory that the backend likes best; first touched by this thread.
  auto staging = std::make_shared<Staging>(backend.memory());
  while (std::optional<Numbered> next = NextLarge()) {
    Status status;
    std::shared_ptr<GroupRun> run;
    if (next->task.change != nullptr) {
      status = Change(*next->task.change);
    } else {
      run = GroupRun::Make(next->task.group, backend, *staging, LargeCutting(*next->task.group),
                           stopped);
      // A backend whose large lane blocks runs through; one that has to be polled leaves the core
      // to others.
      while (run->Advance() != Progress::kOver) {
        if (stopped.load(std::memory_order_relaxed)) break;
        std::this_thread::yield();
      }
    }
    if (!BeginCallOut()) {
      // What its handles and tensors belong to may be gone: nothing of it is destroyed.
      KeepForever(std::make_shared<LaneTask>(next->task));
      KeepForever(std::move(run));
      return;
    }
    if (run != nullptr && !run->status().ok()) {  // as in End
      KeepForever(run);
      KeepForever(std::exchange(staging, std::make_shared<Staging>(backend.memory())));
    }
    // After a stop its handles are complete already.
    if (!stopped.load(std::memory_order_relaxed)) {
      Finish(next->number, next->task, run != nullptr ? run->status() : status);
    }
    if (options.on_progress) options.on_progress();
  }
}

HostLanes::HostLanes(HostLanesOptions options, Backend& backend)
    : impl_(std::make_shared<Impl>(std::move(options), backend)) {
  if (impl_->options.large_lane_thread) {
    // The thread keeps what it uses, whatever becomes of this object.
    impl_->thread = std::thread([impl = impl_] { impl->RunLargeLane(); });
  }
}

HostLanes::~HostLanes() {
  if (!HostLanes::Idle() || impl_->messages.unfinished()) {
    HostLanes::Abandon(Status(StatusCode::kShutDown, "the session has ended"));
  }
  const bool keep = !impl_->small.empty() || impl_->large.run != nullptr;
  bool gone = true;
  {
    core::MutexLock lock(impl_->mutex);
    impl_->quit = true;
    impl_->changed.NotifyAll();
    const core::TimePoint limit = core::Clock::now() + kGrace;
    if (impl_->options.large_lane_thread) {
      using State = Impl::ThreadState;
      while (impl_->thread_state != State::kGone) {
        const bool running = impl_->thread_state == State::kRunning;
        if (running && core::Clock::now() >= limit) break;
        impl_->changed.WaitUntil(impl_->mutex, running ? limit : core::TimePoint::max());
      }
      gone = impl_->thread_state == State::kGone;
      impl_->left = !gone;
    }
  }
  if (impl_->thread.joinable()) {
    if (gone) {
      impl_->thread.join();
    } else {
      impl_->thread.detach();
    }
  }
  if (std::shared_ptr<void> messages = impl_->messages.Release()) {
    KeepForever(std::move(messages));
  }
  if (keep || !gone) KeepForever(impl_);
}

void HostLanes::Start(core::RunBatch batch, core::TimePoint now) {
  for (const core::RunItem& item : batch.items) {
    if (item.absent_everywhere) CompleteAll({item}, Status::Ok());
  }
  core::RankRanges members;
  {
    core::MutexLock lock(impl_->mutex);
    const auto set = impl_->sets.find(batch.set);
    if (set != impl_->sets.end()) members = set->second;
  }
  for (const fusion::Group& group : fusion::Plan(batch, impl_->limits)) {
    auto task = std::make_shared<GroupTask>();
    task->channel = {batch.set, group.lane};
    task->members = members;
    task->rank = impl_->options.rank;
    task->since = now;
    task->chunk_bytes = impl_->chunk_bytes;
    for (const std::size_t i : group.items) task->items.push_back(std::move(batch.items[i]));
    if (!members.Contains(task->rank)) {
      const Status why(StatusCode::kInvalidArgument,
                       "this rank is not in set " + std::to_string(batch.set));
      CompleteAll(task->items, why);
      impl_->Finish(0, {task, nullptr}, why);
      continue;
    }
    impl_->Enqueue({task, nullptr});
  }
  impl_->StepSmall();
}

void HostLanes::StartLarge(GroupTaskPtr group) { impl_->Enqueue({std::move(group), nullptr}); }

void HostLanes::AddSet(core::SetNumber set, const core::RankRanges& members, core::WorkPtr work,
                       core::TimePoint now) {
  impl_->Enqueue({nullptr, std::make_shared<const SetChange>(SetChange{
                               .adds = true,
                               .set = set,
                               .members = members,
                               .rank = impl_->options.rank,
                               .work = std::move(work),
                               .since = now,
                           })});
}

void HostLanes::RemoveSet(core::SetNumber set, core::WorkPtr work, core::TimePoint now) {
  impl_->Enqueue({nullptr, std::make_shared<const SetChange>(SetChange{
                               .adds = false,
                               .set = set,
                               .members = {},
                               .rank = impl_->options.rank,
                               .work = std::move(work),
                               .since = now,
                           })});
}

void HostLanes::SetLimits(const std::vector<std::int64_t>& values) {
  if (values.size() < 3 || *std::min_element(values.begin(), values.end()) < 0 || values[2] < 1) {
    return impl_->Stop({StatusCode::kProtocol, "the ranks agreed on limits that are none"}, "");
  }
  impl_->limits.fusion_bytes = values[0];
  impl_->limits.small_bytes = values[1];
  impl_->chunk_bytes = values[2];
}

void HostLanes::StartMessage(core::WorkPtr work, core::TimePoint now) {
  impl_->messages.Start(std::move(work), now);
}

bool HostLanes::Step(core::TimePoint /*now*/) {
  if (impl_->stopped.load(std::memory_order_relaxed)) return false;
  bool moved = impl_->StepSmall();
  moved |= impl_->StepMessages();
  if (!impl_->options.large_lane_thread) moved |= impl_->StepLarge();
  return moved;
}

bool HostLanes::NeedsStepping() const {
  if (impl_->stopped.load(std::memory_order_relaxed)) return false;
  return !impl_->small.empty() || !impl_->small_queue.empty() || impl_->messages.unfinished() ||
         (!impl_->options.large_lane_thread && impl_->LargeWaits());
}

bool HostLanes::NeedsPolling() const {
  if (impl_->stopped.load(std::memory_order_relaxed)) return false;
  const auto is_silent = [this](const Impl::InFlight& of) {
    return !impl_->backend.Rings(of.run->task()->channel);
  };
  return impl_->messages.unfinished() ||
         std::any_of(impl_->small.begin(), impl_->small.end(), is_silent) ||
         (impl_->large.run != nullptr && is_silent(impl_->large)) ||
         (!impl_->options.large_lane_thread && impl_->LargeWaits() && impl_->large.run == nullptr);
}

bool HostLanes::Idle() const {
  core::MutexLock lock(impl_->mutex);
  // Not while kCallingOut: on_progress must find the lanes idle if they are.
  return impl_->unfinished.empty() && impl_->thread_state != Impl::ThreadState::kRunning;
}

std::vector<core::RunningOperation> HostLanes::Running() const {
  std::vector<core::RunningOperation> operations = impl_->messages.Running();
  core::MutexLock lock(impl_->mutex);
  for (const auto& [number, task] : impl_->unfinished) {
    operations.push_back({task.set(), task.ToString(), task.since()});
  }
  std::stable_sort(operations.begin(), operations.end(),
                   [](const auto& a, const auto& b) { return a.since < b.since; });
  return operations;
}

void HostLanes::Abandon(const Status& why) {
  impl_->Stop(why.ok() ? Status(StatusCode::kAborted, "abandoned") : why, std::nullopt);
}

}  // namespace sirtaki::ops
