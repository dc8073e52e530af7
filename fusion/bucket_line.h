// The order in which buckets are launched whose launch calls a program's hook. Knows nothing of
// LibTorch, so that the thread sanitizer sees all of it.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "core/base/thread_annotations.h"

namespace sirtaki::fusion {

// Buckets become complete in any order and on any thread, as graphs differ between ranks; they are
// launched by their numbers, one at a time, and so in one order on all ranks. In rounds: each bucket
// is completed once in a round, which ends with the launch of the last. Thread-safe; no lock is held
// while a bucket is launched.
class BucketLine {
 public:
  using Launch = std::function<void(std::size_t bucket)>;

  explicit BucketLine(std::size_t buckets) : states_(buckets, State::kOpen) {}

  // Launches the bucket, and those behind it that are complete, if those before it were launched;
  // otherwise whoever completes these does. What `launch` throws comes through.
  void Complete(std::size_t bucket, const Launch& launch) SIRTAKI_EXCLUDES(mutex_);
  // The bucket leaves: nobody completes it from the next round on. Between two rounds, or before
  // those behind it were launched, on all ranks alike.
  void Leave(std::size_t bucket) SIRTAKI_EXCLUDES(mutex_);
  // Begins a new round in the middle of one that cannot end, as a launch has failed.
  void Restart() SIRTAKI_EXCLUDES(mutex_);

 private:
  enum class State { kOpen, kComplete, kLeft };

  std::optional<std::size_t> Begin() SIRTAKI_EXCLUDES(mutex_);
  void End() SIRTAKI_EXCLUDES(mutex_);

  core::Mutex mutex_;
  std::vector<State> states_ SIRTAKI_GUARDED_BY(mutex_);
  std::size_t next_ SIRTAKI_GUARDED_BY(mutex_) = 0;
  bool launching_ SIRTAKI_GUARDED_BY(mutex_) = false;
};

}  // namespace sirtaki::fusion
