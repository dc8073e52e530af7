// One submitted collective on this rank, and the handle through which its submitter learns the end
// of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/request.h"
#include "core/status.h"
#include "core/thread_annotations.h"
#include "core/types.h"

namespace sirtaki::core {

// The shared state of a handle. Completed exactly once: the first Complete wins, later ones are
// no-ops (a fault completes handles at once, a data thread that returns later finds them done).
// Thread-safe. Lock order: token -> queue -> handle.
class HandleState {
 public:
  // `on_complete` runs on the completing thread, after the state is visible, if somebody waits;
  // it only rings a doorbell. `on_observed` runs once, when the submitter has seen the end
  // (synchronized, polled true, or destroyed the handle): the name is free again.
  HandleState(std::function<void()> on_complete, std::function<void()> on_observed);
  ~HandleState();
  HandleState(const HandleState&) = delete;
  HandleState& operator=(const HandleState&) = delete;

  bool Complete(Status status);  // false if it was complete already
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Preconditions of both: done().
  const Status& status() const { return status_; }
  // True if no rank had this tensor (every rank reported it absent): the result is meaningless.
  bool absent_everywhere() const { return absent_everywhere_.load(std::memory_order_relaxed); }
  // Before Complete, by the completer. Of two completers the one that comes too late may still call
  // it.
  void SetAbsentEverywhere() { absent_everywhere_.store(true, std::memory_order_relaxed); }

  // Idempotent. The destructor does it too, so that no name stays taken; hence the last HandlePtr
  // must not be dropped while holding a lock that `on_observed` takes.
  void Observe();
  // The submission was refused, so this handle never held its name: observing it frees nothing.
  void Disown() { observed_.store(true, std::memory_order_release); }

  // Brackets a wait, so that Complete rings only if somebody listens.
  void BeginWait() { waiters_.fetch_add(1, std::memory_order_seq_cst); }
  void EndWait() { waiters_.fetch_sub(1, std::memory_order_seq_cst); }

 private:
  std::function<void()> on_complete_;
  std::function<void()> on_observed_;
  Mutex mutex_;    // serialises completers
  Status status_;  // written once, before done_
  std::atomic<bool> absent_everywhere_{false};
  std::atomic<bool> done_{false};
  std::atomic<bool> observed_{false};
  std::atomic<int> waiters_{0};
};

using HandlePtr = std::shared_ptr<HandleState>;

// Host memory of one collective. Kept alive by the Work until the last thread that may touch it is
// done, which after a fault may be never.
struct Work {
  Request request;
  const void* input =
      nullptr;             // request.signature->ElementCount() elements (all-gather: times rows)
  void* output = nullptr;  // all-reduce, broadcast: same size; may equal input (in place)
  std::int64_t rows = 0;   // all-gather: this rank's first dimension
  // All-gather: called once, on the lane's thread, when the rows of all members (ascending by rank)
  // are known; returns the output's memory (may be null if the result is empty). May throw
  // std::bad_alloc or LibTorch's error; the lane turns that into the group's fault.
  std::function<void*(const std::vector<std::int64_t>& rows)> allocate_output;
  TimePoint deadline = TimePoint::max();  // of the call; passing it is the group's fault
  TimePoint submitted{};
  HandlePtr handle;
  std::shared_ptr<void> keep_alive;  // the tensors
};
using WorkPtr = std::shared_ptr<Work>;

}  // namespace sirtaki::core
