// A backend of one rank that moves next to nothing and does what the test says: blocks, fails,
// holds.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"
#include "ops/base/backend.h"

namespace sirtaki::tests {

class FakeBackend : public ops::Backend {
 public:
  class Operation : public ops::Completion {
   public:
    bool Poll() override {
      if (lacks_memory) throw std::bad_alloc();
      return done->load();
    }
    core::Status status() const override { return result; }
    std::shared_ptr<std::atomic<bool>> done = std::make_shared<std::atomic<bool>>(false);
    core::Status result;
    bool lacks_memory = false;
  };

  std::string_view name() const override { return "fake"; }
  core::Status AddSet(core::SetNumber set, const core::RankRanges&) override {
    return Run({set, fusion::Lane::kLarge})->status();
  }
  core::Status RemoveSet(core::SetNumber set) override {
    return Run({set, fusion::Lane::kLarge})->status();
  }
  std::unique_ptr<ops::Completion> Reduce(ops::Channel channel, void*, std::int64_t, core::DType,
                                          core::ReduceOp, int) override {
    return Run(channel);
  }
  std::unique_ptr<ops::Completion> Exchange(ops::Channel channel,
                                            std::span<const ops::OutgoingSlice>,
                                            std::span<const ops::IncomingSlice>) override {
    return Run(channel);
  }
  std::unique_ptr<ops::Completion> SendMessage(int, int, const void*, std::int64_t) override {
    return Run({});
  }
  std::unique_ptr<ops::Completion> ReceiveMessage(int, int, void*, std::int64_t) override {
    return Run({});
  }
  std::unique_ptr<ops::Completion> AllReduce(ops::Channel channel, void*, std::int64_t, core::DType,
                                             core::ReduceOp, fusion::Scale) override {
    return Run(channel);
  }
  std::unique_ptr<ops::Completion> Broadcast(ops::Channel channel, void*, std::int64_t,
                                             int) override {
    return Run(channel);
  }
  std::unique_ptr<ops::Completion> AllGather(ops::Channel channel, const void* in, void* out,
                                             std::int64_t bytes) override {
    std::memcpy(out, in, static_cast<std::size_t>(bytes));
    return Run(channel);
  }
  std::unique_ptr<ops::Completion> AllGatherV(ops::Channel channel, const void*, void*,
                                              std::span<const std::int64_t>) override {
    return Run(channel);
  }
  ops::LetGo WhenLetGo(ops::Channel) const override { return let_go; }
  void Abort(const core::Status& why) override {
    core::MutexLock lock(mutex_);
    aborts_.push_back(why);
    if (abort_frees_) FreeLocked();
  }

  // The large lane blocks from now on until Free, or until Abort if that frees it.
  void Block(bool abort_frees) {
    core::MutexLock lock(mutex_);
    blocked_ = true;
    abort_frees_ = abort_frees;
  }
  void Free() {
    core::MutexLock lock(mutex_);
    FreeLocked();
  }
  void FailFrom(int operation, core::Status why) {
    core::MutexLock lock(mutex_);
    fail_from_ = operation;
    why_ = std::move(why);
  }
  // The operations of the small lane stay under way from now on.
  void HoldSmall() {
    core::MutexLock lock(mutex_);
    hold_small_ = true;
  }
  // Until now.
  void LetSmallGo() {
    core::MutexLock lock(mutex_);
    hold_small_ = false;
    for (const auto& done : held_) done->store(true);
    held_.clear();
  }
  // Those that stay, and that nobody has withdrawn.
  std::int64_t held() const {
    core::MutexLock lock(mutex_);
    return std::count_if(held_.begin(), held_.end(),
                         [](const auto& done) { return done.use_count() > 1; });
  }
  int operations() const {
    core::MutexLock lock(mutex_);
    return operations_;
  }
  bool inside() const {
    core::MutexLock lock(mutex_);
    return inside_;
  }
  std::vector<core::Status> aborts() const {
    core::MutexLock lock(mutex_);
    return aborts_;
  }

  std::atomic<bool> lacks_memory = false;  // the operations that are begun then
  ops::LetGo let_go;                       // set before it is used; null: its memory stays

 private:
  std::unique_ptr<Operation> Run(ops::Channel channel) {
    auto operation = std::make_unique<Operation>();
    core::MutexLock lock(mutex_);
    if (operations_++ >= fail_from_) operation->result = why_;
    operation->lacks_memory = lacks_memory;
    if (channel.lane == fusion::Lane::kLarge) {
      inside_ = true;
      while (blocked_) changed_.Wait(mutex_);
      inside_ = false;
    }
    if (channel.lane == fusion::Lane::kSmall && hold_small_) {
      held_.push_back(operation->done);
    } else {
      operation->done->store(true);
    }
    return operation;
  }
  void FreeLocked() SIRTAKI_REQUIRES(mutex_) {
    blocked_ = false;
    changed_.NotifyAll();
  }

  mutable core::Mutex mutex_;
  core::CondVar changed_;
  int operations_ SIRTAKI_GUARDED_BY(mutex_) = 0;
  int fail_from_ SIRTAKI_GUARDED_BY(mutex_) = std::numeric_limits<int>::max();
  core::Status why_ SIRTAKI_GUARDED_BY(mutex_);
  bool hold_small_ SIRTAKI_GUARDED_BY(mutex_) = false;
  std::vector<std::shared_ptr<std::atomic<bool>>> held_ SIRTAKI_GUARDED_BY(mutex_);
  bool blocked_ SIRTAKI_GUARDED_BY(mutex_) = false;
  bool abort_frees_ SIRTAKI_GUARDED_BY(mutex_) = false;
  bool inside_ SIRTAKI_GUARDED_BY(mutex_) = false;
  std::vector<core::Status> aborts_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::tests
