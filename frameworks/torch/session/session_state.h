// The state of one membership in a job, between init() and shutdown(): the LibTorch-free session,
// and what LibTorch's side remembers of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/base/types.h"
#include "core/engine/work.h"
#include "frameworks/torch/session/backward_ends.h"
#include "frameworks/torch/session/gradient_registry.h"
#include "frameworks/torch/session/known_calls.h"
#include "frameworks/torch/session/pipeline_registry.h"
#include "frameworks/torch/session/session_scope.h"
#include "session/session.h"
#include "sirtaki/process_set.h"

namespace sirtaki::detail {

class SessionState;

// A checkpoint that is being written while the program goes on.
class SaveUnderWay {
 public:
  virtual ~SaveUnderWay() = default;
  // Waits until the save is published. Throws on every rank if it could not be written on one, or not
  // in time: it is given up then, and the checkpoint before it stays. If it was given up before, this
  // waits until nothing of it is under way any more. Collective.
  virtual void Finish(const std::shared_ptr<SessionState>& state) = 0;
  virtual bool is_given_up() = 0;
  // Waits until this rank has written, or the save is too late, which End tells.
  virtual void WaitForOwn() = 0;
  // Waits for the thread, or leaves it behind if it is too late. The save is published if all ranks
  // have written. Returns what went wrong; empty: nothing, or it was told before.
  virtual std::string End() = 0;
};

// Thread-safe.
class SessionState {
 public:
  explicit SessionState(std::shared_ptr<session::Session> session) : session_(std::move(session)) {}
  ~SessionState() {
    if (save_) (void)save_->End();
  }
  SessionState(const SessionState&) = delete;
  SessionState& operator=(const SessionState&) = delete;

  const session::Topology& topology() const { return session_->topology(); }
  // Ok while calls are accepted.
  core::Status Check() const { return session_->Check(); }
  // Shut down, or in a forked child; a fault alone does not make it so.
  bool gone() const { return !session_->is_alive(); }

  // Makes the work's handle if it is accepted.
  core::Status Submit(const core::WorkPtr& work, bool will_wait) {
    return session_->Submit(work, will_wait);
  }
  // Returns when the handle is done, with its status.
  core::Status Wait(core::HandleState& handle) { return session_->Wait(handle); }

  // 1 for the first optimizer of the set: its ranks make them in the same order.
  int NextOptimizerNumber(core::SetNumber set) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ++optimizers_[set];
  }
  // 1 for the first module of this name in the set: its ranks ask in the same order.
  int NextModuleNumber(core::SetNumber set, const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ++modules_[{set, name}];
  }

  // How often this rank has joined the set, and come back.
  std::shared_ptr<std::atomic<std::uint64_t>> JoinsOf(core::SetNumber set) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& joins = joins_[set];
    if (!joins) joins = std::make_shared<std::atomic<std::uint64_t>>(0);
    return joins;
  }

  // 1 for the first message: its key, which no other rank knows.
  int NextMessageNumber() { return ++messages_; }

  void SetInitialSets(std::vector<ProcessSet> sets) {
    const std::lock_guard<std::mutex> lock(mutex_);
    initial_sets_ = std::move(sets);
  }
  std::vector<ProcessSet> InitialSets() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return initial_sets_;
  }

  // The save of a checkpoint that is under way; null: none.
  void SetSave(std::shared_ptr<SaveUnderWay> save) {
    const std::lock_guard<std::mutex> lock(mutex_);
    save_ = std::move(save);
  }
  std::shared_ptr<SaveUnderWay> save() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return save_;
  }
  std::shared_ptr<SaveUnderWay> TakeSave() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(save_, nullptr);
  }

  GradientRegistry& gradients() { return gradients_; }
  BackwardEnds& backward_ends() { return backward_ends_; }
  KnownCalls& known_calls() { return known_calls_; }
  PipelineRegistry& pipelines() { return pipelines_; }

  session::Session& session() { return *session_; }

 private:
  const std::shared_ptr<session::Session> session_;
  std::atomic<int> messages_{0};
  GradientRegistry gradients_;
  BackwardEnds backward_ends_;
  KnownCalls known_calls_;
  PipelineRegistry pipelines_;
  std::mutex mutex_;  // guards what follows
  std::map<core::SetNumber, int> optimizers_;
  std::map<std::pair<core::SetNumber, std::string>, int> modules_;
  std::vector<ProcessSet> initial_sets_;
  std::map<core::SetNumber, std::shared_ptr<std::atomic<std::uint64_t>>> joins_;
  std::shared_ptr<SaveUnderWay> save_;
};

}  // namespace sirtaki::detail
