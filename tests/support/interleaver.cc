#include "tests/support/interleaver.h"

#include <algorithm>
#include <utility>

namespace sirtaki::tests {

// A look at the clock takes this long.
constexpr core::Duration kTick = std::chrono::microseconds(5);

void Interleaver::Add(std::function<void()> body) {
  threads_.push_back(std::make_unique<Thread>());
  threads_.back()->body = std::move(body);
}

bool Interleaver::Run(std::uint64_t most_steps) {
  steps_left_ = most_steps;
  std::vector<std::thread> threads;
  for (const auto& thread : threads_) {
    threads.emplace_back([this, self = thread.get()] {
      self->turn.acquire();
      current_ = this;
      self_ = self;
      self->body();
      self->over = true;
      HandOn(*self);
    });
  }
  Next()->turn.release();
  ended_.acquire();
  for (std::thread& thread : threads) failed_ ? thread.detach() : thread.join();
  return !failed_;
}

void Interleaver::Step() {
  if (steps_left_ > 0) --steps_left_;
  HandOn(*self_);
}

bool Interleaver::SleepUntil(const std::function<bool()>& ready, core::TimePoint deadline) {
  self_->deadline = deadline;
  self_->ready = ready;
  Step();
  self_->ready = nullptr;
  return ready();
}

core::TimePoint Interleaver::Now() {
  if (self_ != nullptr) Step();
  return now_ += kTick;
}

Interleaver::Thread* Interleaver::Next() {
  std::vector<Thread*> able;
  for (const auto& thread : threads_) {
    if (CanGoOn(*thread)) able.push_back(thread.get());
  }
  if (!able.empty()) {
    // In some runs a thread is seldom interrupted, in others after each step: both find faults.
    const bool stays = self_ != nullptr && CanGoOn(*self_) && Choose(stays_) != 0;
    return stays ? self_ : able[Choose(static_cast<std::uint32_t>(able.size()))];
  }
  core::TimePoint until = core::TimePoint::max();
  for (const auto& thread : threads_) {
    if (!thread->over) until = std::min(until, thread->deadline);
  }
  if (until == core::TimePoint::max()) return nullptr;
  if (all_sleep) all_sleep(until);
  now_ = until;
  return Next();
}

void Interleaver::HandOn(Thread& self) {
  const bool all_over = std::all_of(threads_.begin(), threads_.end(),
                                    [](const auto& thread) { return thread->over; });
  Thread* const next = all_over || steps_left_ == 0 ? nullptr : Next();
  if (next == &self) return;
  if (next != nullptr) {
    next->turn.release();
  } else {
    failed_ = !all_over;
    ended_.release();
  }
  if (!self.over) self.turn.acquire();
}

}  // namespace sirtaki::tests
