// The hooks are what handles need of their engine, which they may outlive. Thread-safe.
#pragma once

#include <memory>

#include "core/base/recycling.h"
#include "core/base/thread_annotations.h"
#include "core/engine/tensor_queue.h"
#include "core/engine/work.h"
#include "core/machine/fork_guard.h"
#include "core/protocol/request.h"
#include "core/protocol/transport.h"

namespace sirtaki::core {

class HandleHooks final : public HandleWatcher {
 public:
  // `transport` may be null: nobody sleeps.
  HandleHooks(Transport* transport, TensorQueue* queue) : transport_(transport), queue_(queue) {}

  static HandlePtr MakeHandle(const std::shared_ptr<HandleHooks>& hooks, const Key& key) {
    return MakeRecycled<HandleState>(hooks, key);
  }

  void Completed() override SIRTAKI_EXCLUDES(bell_mutex_) {
    if (InForkedChild()) return;
    MutexLock lock(bell_mutex_);
    if (transport_ != nullptr) transport_->Wake();
  }

  void Observed(const Key& key) override SIRTAKI_EXCLUDES(names_mutex_) {
    // An unnamed call's number is given by the queue, and holds no name.
    if (key.form == Key::Form::kUnnamed || InForkedChild()) return;
    MutexLock lock(names_mutex_);
    if (queue_ != nullptr) queue_->ReleaseName(key);
  }

  // The engine ends: from now on nothing is called any more.
  void Detach() SIRTAKI_EXCLUDES(bell_mutex_, names_mutex_) {
    {
      MutexLock lock(names_mutex_);
      queue_ = nullptr;
    }
    MutexLock lock(bell_mutex_);
    transport_ = nullptr;
  }

 private:
  // There the locks, these and the queue's, may be held by threads that exist in the parent alone.
  bool InForkedChild() const { return ForkGeneration() != fork_generation_; }

  const int fork_generation_ = ForkGeneration();

  // Apart, because a handle may complete under locks that come after the queue's, while observing
  // it takes the queue's.
  Mutex bell_mutex_;
  Mutex names_mutex_;
  Transport* transport_ SIRTAKI_GUARDED_BY(bell_mutex_);
  TensorQueue* queue_ SIRTAKI_GUARDED_BY(names_mutex_);
};

}  // namespace sirtaki::core
