#include "fusion/bucket_line.h"

namespace sirtaki::fusion {

void BucketLine::Complete(std::size_t bucket, const Launch& launch) {
  {
    const core::MutexLock lock(mutex_);
    states_[bucket] = State::kComplete;
  }
  // A thread that completes a bucket while another thread launches one leaves it to that thread.
  while (const auto next = Begin()) {
    struct Ended {
      BucketLine* line;
      ~Ended() { line->End(); }
    } const ended{this};
    launch(*next);
  }
}

void BucketLine::Leave(std::size_t bucket) {
  const core::MutexLock lock(mutex_);
  states_[bucket] = State::kLeft;
}

void BucketLine::Restart() {
  const core::MutexLock lock(mutex_);
  next_ = 0;
  for (State& state : states_) {
    if (state == State::kComplete) state = State::kOpen;
  }
}

std::optional<std::size_t> BucketLine::Begin() {
  const core::MutexLock lock(mutex_);
  if (launching_) return std::nullopt;
  for (std::size_t left = states_.size(); left > 0 && states_[next_] == State::kLeft; --left) {
    next_ = (next_ + 1) % states_.size();
  }
  if (states_[next_] != State::kComplete) return std::nullopt;
  states_[next_] = State::kOpen;
  launching_ = true;
  const std::size_t begun = next_;
  next_ = (next_ + 1) % states_.size();
  return begun;
}

void BucketLine::End() {
  const core::MutexLock lock(mutex_);
  launching_ = false;
}

}  // namespace sirtaki::fusion
