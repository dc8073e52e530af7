// The host lanes at work: what is queued, what runs, and how it ends.
#include <chrono>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "core/protocol/message.h"
#include "ops/base/keep_forever.h"
#include "ops/host/host_lanes_impl.h"

namespace sirtaki::ops {

using core::Status;

namespace {

// More small operations at once than this bring nothing, and each holds its staging memory.
constexpr std::size_t kSmallInFlight = 16;

// The pause lies between looks whether the inputs of a group are there.
constexpr auto kInputsPause = std::chrono::microseconds(100);

}  // namespace

void HostLanes::Impl::Enqueue(LaneTask task) {
  const bool is_small = task.is_small();
  if (Take(task, !is_small) && is_small) small_queue.push_back(std::move(task));
}

void HostLanes::Impl::Conclude(const LaneTask& task, const Status& status) {
  // Another rank's fault has its text already, the same on all ranks.
  const bool is_others = status.origin().rank >= 0 && status.origin().rank != options.rank;
  if (!status.ok()) return Stop(is_others ? status : task.Describe(status), task.TensorName());
  task.Complete(status);
  core::MutexLock lock(mutex);
  unfinished.erase(task.number);
  // A set that goes may have waited for it.
  const bool set_waits = !queue.empty() && queue.front().change != nullptr;
  if (task.is_small() && set_waits) changed.NotifyAll();
}

void HostLanes::Impl::Stop(const Status& reason, const std::optional<std::string>& tensor) {
  // A group that runs keeps its memory: the run itself refers to its task.
  Lane::Stop(reason, tensor, [&] {
    backend.Abort(reason);
    messages.Stop(reason);
  });
}

void HostLanes::Impl::Keep(const GroupTask& task, std::shared_ptr<void> what) {
  LetGo one = task.route.backend->WhenLetGo(task.channel);
  LetGo other = task.route.rootless->WhenLetGo(task.channel);
  if (!one || !other) return KeepForever(std::move(what));
  KeepUntil([one, other] { return one() && other(); }, std::move(what));
}

void HostLanes::Impl::EndSmall(InFlight over) {
  const LaneTask task = over.task;
  const Status status = over.run->status();
  if (status.ok()) {
    over.run.reset();
    pool.Return(std::move(over.staging));
  } else {
    Keep(*task.group, std::make_shared<InFlight>(std::move(over)));
  }
  Conclude(task, status);
}

bool HostLanes::Impl::StepSmall() {
  bool moved = false;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < small.size(); ++i) {
    const Progress progress = stopped() ? Progress::kWaiting : small[i].run->Advance();
    moved |= progress != Progress::kWaiting;
    if (progress == Progress::kOver) {
      EndSmall(std::move(small[i]));
    } else {
      if (kept != i) small[kept] = std::move(small[i]);
      ++kept;
    }
  }
  small.resize(kept);

  while (!small_queue.empty() && small.size() < kSmallInFlight &&
         (small.empty() || small_begun - small.front().begun < Backend::kSmallAhead) &&
         !stopped()) {
    InFlight next;
    next.task = std::move(small_queue.front());
    next.begun = small_begun++;
    next.staging = pool.Take();
    // A small group goes in one window.
    const fusion::Cutting whole{.chunk_bytes = std::numeric_limits<std::int64_t>::max()};
    next.run = GroupRun::Make({next.task.group, *next.staging, whole, stop(), options.observer});
    small_queue.pop_front();
    moved = true;
    if (next.run->Advance() != Progress::kOver) {
      small.push_back(std::move(next));
      continue;
    }
    EndSmall(std::move(next));
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
  if (queue.empty() || LargeAwaitsInputs()) return false;
  const SetChangePtr& change = queue.front().change;
  if (change == nullptr || change->adds) return true;
  for (const auto& [number, task] : unfinished) {
    if (task.is_small() && task.set() == change->set) return false;
  }
  return true;
}

bool HostLanes::Impl::LargeAwaitsInputs() const {
  if (queue.empty() || queue.front().group == nullptr) return false;
  const auto& there = queue.front().group->inputs_there;
  return there != nullptr && !there->load(std::memory_order_acquire);
}

std::optional<LaneTask> HostLanes::Impl::NextLarge() {
  core::MutexLock lock(mutex);
  for (;;) {
    // Nobody tells when a device has brought them. Asked first: they may come between two
    // questions.
    const bool looks = LargeAwaitsInputs();
    if (LargeIsReady()) break;
    if (quits()) return std::nullopt;
    WaitUntil(looks ? core::Clock::now() + kInputsPause : core::TimePoint::max());
  }
  LaneTask next = std::move(queue.front());
  queue.pop_front();
  large_runs = true;
  return next;
}

void HostLanes::Impl::RunLargeLane() {
  // The staging is in memory that the backend likes best, first touched by this thread.
  auto staging = std::make_shared<Staging>(backend.memory());
  while (std::optional<LaneTask> next = NextLarge()) {
    Status status;
    std::shared_ptr<GroupRun> run;
    if (next->change != nullptr) {
      const SetChange& change = *next->change;
      status = core::OrThrown([&] {
        return change.adds ? backend.AddSet(change.set, change.members)
                           : backend.RemoveSet(change.set);
      });
    } else {
      run = GroupRun::Make(
          {next->group, *staging, LargeCutting(*next->group), stop(), options.observer});
      run->Advance();
      status = run->status();
    }
    const bool told = CallOut([&] {
      {
        core::MutexLock lock(mutex);
        large_runs = false;  // on_progress must find the lanes idle if they are
      }
      if (run != nullptr && !status.ok()) {
        using Used = std::pair<std::shared_ptr<Staging>, std::shared_ptr<GroupRun>>;
        Keep(*next->group, std::make_shared<Used>(
                               std::exchange(staging, std::make_shared<Staging>(backend.memory())),
                               std::exchange(run, nullptr)));
      }
      // After a stop its handles are complete already.
      if (!stopped()) Conclude(*next, status);
      if (options.on_progress) options.on_progress();
      // Both refer to the program's tensors, which go before the lane may have been left.
      run.reset();
      next.reset();
    });
    if (told) continue;
    // The owners of the task's handles and tensors may be gone: nothing of it is destroyed.
    KeepForever(std::make_shared<LaneTask>(*next));
    KeepForever(std::move(run));
    KeepForever(std::move(staging));
    return;
  }
}

}  // namespace sirtaki::ops
