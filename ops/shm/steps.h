// Steps are an operation written as if it could wait: a coroutine that is resumed when what it awaits
// is over. So the same code is polled on one lane and blocks on another.
#pragma once

#include <coroutine>
#include <utility>

#include "core/base/status.h"
#include "ops/shm/channel.h"

namespace sirtaki::ops::shm {

// Steps own the coroutine. Not thread-safe.
class Steps {
 public:
  struct promise_type {
    Wait wait;
    core::Status status;

    Steps get_return_object() {
      return Steps(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_value(core::Status result) { status = std::move(result); }
    void unhandled_exception() { status = core::StatusOfException(); }

    struct Awaiter {
      const Wait& wait;
      bool await_ready() const { return wait.channel->IsOver(wait); }
      void await_suspend(std::coroutine_handle<promise_type> steps) const {
        steps.promise().wait = wait;
      }
      void await_resume() const {}
    };
    Awaiter await_transform(const Wait& awaited) { return {awaited}; }
  };

  Steps(Steps&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Steps& operator=(Steps&&) = delete;
  ~Steps() {
    if (handle_) handle_.destroy();
  }

  bool done() const { return handle_.done(); }
  const Wait& wait() const { return handle_.promise().wait; }  // after a Resume, not done
  const core::Status& status() const { return handle_.promise().status; }  // done
  void Resume() { handle_.resume(); }

 private:
  explicit Steps(std::coroutine_handle<promise_type> handle) : handle_(handle) {}

  std::coroutine_handle<promise_type> handle_;
};

}  // namespace sirtaki::ops::shm
