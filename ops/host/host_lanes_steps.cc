// The host lanes at work: what is queued, what runs, and how it ends.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "core/protocol/message.h"
#include "ops/base/keep_forever.h"
#include "ops/host/host_lanes_impl.h"

namespace sirtaki::ops {

using core::Status;

namespace {

// More small operations at once than this bring nothing, and each holds its staging memory.
constexpr std::size_t kSmallInFlight = 16;

// Between looks whether the inputs of a group are there.
constexpr auto kInputsPause = std::chrono::microseconds(100);

}  // namespace

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
  // Another rank's fault has its text already, the same on all ranks.
  const bool is_others = status.origin().rank >= 0 && status.origin().rank != options.rank;
  if (!status.ok()) return Stop(is_others ? status : task.Describe(status), task.TensorName());
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
    failed = unfinished;
    large_queue.clear();
    changed.NotifyAll();
  }
  // The task first: who finds its handle failed, or the lanes idle, must find the fault as well.
  if (tensor && options.on_failure) options.on_failure(reason, *tensor);
  {
    core::MutexLock lock(mutex);
    for (const auto& [number, task] : failed) dropped.push_back(task.Running());
    unfinished.clear();
  }
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
         (small.empty() || small_begun - small.front().begun < Backend::kSmallAhead) &&
         !stopped.load(std::memory_order_relaxed)) {
    InFlight next;
    next.number = small_queue.front().number;
    next.begun = small_begun++;
    next.staging = pool.Take();
    // The whole group in one window, in staging memory: after a fault nobody writes to the tensors.
    const fusion::Cutting whole{.chunk_bytes = std::numeric_limits<std::int64_t>::max()};
    next.run = GroupRun::Make(small_queue.front().task.group, backend, *next.staging, whole,
                              stopped, options.observer);
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

bool HostLanes::Impl::StepP2p() {
  std::optional<P2p::Failure> failure;
  const bool moved = messages.Step(&failure);
  if (failure) Stop(failure->why, core::TensorName(failure->work->request.key));
  return moved;
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
    bool is_over = true;
    if (next->task.change != nullptr) {
      status = Change(*next->task.change);
    } else {
      run = GroupRun::Make(next->task.group, backend, *staging, LargeCutting(*next->task.group),
                           stopped, options.observer);
      // Each step blocks until its operation is over; of one that does not, the core is left to others.
      while (!(is_over = run->Advance() == Progress::kOver) &&
             !stopped.load(std::memory_order_relaxed)) {
        std::this_thread::yield();
      }
    }
    if (!BeginCallOut()) {
      // What its handles and tensors belong to may be gone: nothing of it is destroyed.
      KeepForever(std::make_shared<LaneTask>(next->task));
      KeepForever(std::move(run));
      KeepForever(std::move(staging));
      return;
    }
    // A run that has failed is kept, as in End. One that a stop has left under way has no failure of
    // its own.
    if (run != nullptr && (!is_over || !run->status().ok())) {
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

}  // namespace sirtaki::ops
