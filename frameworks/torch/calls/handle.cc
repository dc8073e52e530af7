#include "sirtaki/handle.h"

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>

#include "core/base/log.h"
#include "core/threads/quiet_thread.h"
#include "frameworks/torch/calls/pending.h"
#include "frameworks/torch/session/session_scope.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

template <class AnyHandle>
detail::Pending& PendingOf(const AnyHandle& handle) {
  if (!handle.valid()) {
    detail::ThrowInvalid("the handle is empty: no operation returned it");
  }
  return *handle.pending();
}

// Threads that call back when operations have ended. As many are made as callbacks run at a time: a
// callback may wait for what another one starts. Thread-safe.
class Callbacks {
 public:
  static Callbacks& OfProcess() {
    static auto* const callbacks = new Callbacks();  // never destroyed: its threads never end
    return *callbacks;
  }

  // There is a thread. Throws std::system_error if the system gives none.
  void Begin() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (threads_ == 0) StartThread();
  }

  // Precondition: Begin.
  void Add(std::function<void()> call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(call));
    added_.notify_one();
    if (idle_ >= waiting_.size()) return;
    try {
      StartThread();
    } catch (const std::system_error&) {
      // The next thread that is free takes the call.
    }
  }

 private:
  void StartThread() {
    core::StartQuietThread([this] { Run(); }).detach();
    ++threads_;
  }

  [[noreturn]] void Run() {
    for (;;) {
      std::function<void()> next;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        ++idle_;
        added_.wait(lock, [this] { return !waiting_.empty(); });
        --idle_;
        next = std::move(waiting_.front());
        waiting_.pop_front();
      }
      next();
    }
  }

  std::mutex mutex_;  // guards what follows
  std::condition_variable added_;
  std::deque<std::function<void()>> waiting_;
  std::size_t idle_ = 0;
  std::size_t threads_ = 0;
};

template <class AnyHandle>
void Then(const AnyHandle& handle, std::function<void(const AnyHandle&)> callback) {
  (void)handle.done();  // throws for a handle that nobody can wait for
  Callbacks::OfProcess().Begin();
  std::function<void()> call = [handle, callback = std::move(callback),
                                given = detail::SessionScope::Given()] {
    const detail::SessionScope scope(given);
    try {
      callback(handle);
    } catch (...) {
      const std::string why = "a callback of Handle::then has thrown: " + detail::TextOfCurrent();
      SIRTAKI_LOG(kError, why);  // the session may have gone, and then nobody else says it
      handle.pending()->Abort(why);
    }
  };
  // It is moved on, because the last copy of a handle must not go where operations complete.
  PendingOf(handle).Then(
      [call = std::move(call)]() mutable { Callbacks::OfProcess().Add(std::move(call)); });
}

}  // namespace

bool Handle::done() const { return PendingOf(*this).Poll(); }
bool GroupedHandle::done() const { return PendingOf(*this).Poll(); }

at::Tensor Handle::result() const { return PendingOf(*this).Synchronize(); }
std::vector<at::Tensor> GroupedHandle::results() const { return PendingOf(*this).Results(); }

void Handle::then(std::function<void(const Handle&)> callback) const {
  Then(*this, std::move(callback));
}
void GroupedHandle::then(std::function<void(const GroupedHandle&)> callback) const {
  Then(*this, std::move(callback));
}

bool poll(const Handle& handle) { return handle.done(); }
bool poll(const GroupedHandle& handle) { return handle.done(); }

at::Tensor synchronize(const Handle& handle) { return handle.result(); }
std::vector<at::Tensor> synchronize(const GroupedHandle& handle) { return handle.results(); }

std::vector<std::int64_t> received_splits(const Handle& handle) {
  return PendingOf(handle).ReceivedRows().front();
}
std::vector<std::vector<std::int64_t>> received_splits(const GroupedHandle& handle) {
  return PendingOf(handle).ReceivedRows();
}

}  // namespace sirtaki
