// A lane knows what it has taken and not finished, and stops once, with one cause, for all of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/executor.h"
#include "core/threads/leavable_thread.h"

namespace sirtaki::ops {

// A `Task` is cheap to copy, and has a `number`, which the lane gives, Complete(status) and
// AddRunning(list). A lane's members are called by any thread. No lock is held while a callback or
// Complete is called.
template <typename Task>
class Lane : public core::LeavableThread {
 public:
  // `on_failure`: called once at most, by Stop.
  using OnFailure = std::function<void(const core::Status& why, const std::string& tensor)>;
  explicit Lane(OnFailure on_failure) : on_failure_(std::move(on_failure)) {}

  // Takes the task, numbers it and queues it for the thread if `queues`. A lane that has stopped
  // completes it instead, and returns false.
  bool Take(Task& task, bool queues = true) SIRTAKI_EXCLUDES(mutex) {
    core::Status refused;
    {
      core::MutexLock lock(mutex);
      refused = why_;
      if (refused.ok()) {
        task.number = next_number_++;
        unfinished.emplace(task.number, task);
        if (queues) {
          queue.push_back(task);
          changed.NotifyAll();
        }
      }
    }
    if (!refused.ok()) task.Complete(refused);
    return refused.ok();
  }

  // Ends the lane, once: nothing is taken any more, and all that is unfinished completes with
  // `reason`. `tensor`: the one whose failure it is; none for Abandon. `abort`: ends what is under
  // way outside, before a program goes on with its tensors.
  void Stop(const core::Status& reason, const std::optional<std::string>& tensor,
            const std::function<void()>& abort) SIRTAKI_EXCLUDES(mutex) {
    std::map<std::uint64_t, Task> failed;
    {
      core::MutexLock lock(mutex);
      if (stopped()) return;
      failed = unfinished;  // first: memory may be short
      why_ = reason;
      stop_ = true;
      queue.clear();
      changed.NotifyAll();
    }
    // The failure is told first: who finds its handle failed, or the lane idle, must find it, too.
    if (tensor && on_failure_) on_failure_(reason, *tensor);
    {
      core::MutexLock lock(mutex);
      for (const auto& [number, task] : failed) task.AddRunning(&dropped_);
      unfinished.clear();
    }
    abort();
    for (const auto& [number, task] : failed) task.Complete(reason);
  }
  bool stopped() const { return stop_.load(std::memory_order_relaxed); }
  const std::atomic<bool>& stop() const { return stop_; }

  // The task is over; false if a stop has finished it.
  bool Finish(std::uint64_t number) SIRTAKI_EXCLUDES(mutex) {
    core::MutexLock lock(mutex);
    return unfinished.erase(number) != 0 && !stopped();
  }
  // Running lists what is unfinished, and what was when the lane stopped.
  std::vector<core::RunningOperation> Running() const SIRTAKI_EXCLUDES(mutex) {
    core::MutexLock lock(mutex);
    std::vector<core::RunningOperation> running = dropped_;
    for (const auto& [number, task] : unfinished) task.AddRunning(&running);
    return running;
  }

  std::deque<Task> queue SIRTAKI_GUARDED_BY(mutex);  // for the thread
  std::map<std::uint64_t, Task> unfinished SIRTAKI_GUARDED_BY(mutex);

 private:
  const OnFailure on_failure_;
  std::atomic<bool> stop_{false};  // set under the mutex
  core::Status why_ SIRTAKI_GUARDED_BY(mutex);
  std::uint64_t next_number_ SIRTAKI_GUARDED_BY(mutex) = 0;
  std::vector<core::RunningOperation> dropped_ SIRTAKI_GUARDED_BY(mutex);  // by Stop
};

}  // namespace sirtaki::ops
