// One planned group on its way: a small machine that starts the group's operations one after the
// other and packs and unpacks between them. It never waits by itself: on a lane whose operations
// block inside the call it runs through, on a polled lane it advances as far as it can each time.
//
// Each way of moving has a run, in this folder: reduce_runs, reduce_scatter_run, adasum_run,
// gather_runs, exchange_runs. All members of the set, those that have joined too, start the same
// operations in the same order; what they start follows from what all agree on.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fusion/pack.h"
#include "ops/base/staging.h"
#include "ops/groups/group_task.h"
#include "ops/groups/group_trace.h"

namespace sirtaki::ops {

enum class Progress : std::uint8_t {
  kWaiting,  // an operation is under way; nothing changed
  kMoved,    // one finished and the next is under way
  kOver,     // the outputs are written, or status() says what failed
};

// Every run is made from a context. The task's backends, `staging` and `stop` must outlive it.
struct RunContext {
  GroupTaskPtr task;
  Staging& staging;
  fusion::Cutting cutting;
  const std::atomic<bool>& stop;
  core::trace::ObserverPtr observer;  // null: none
};

// GroupRun is not thread-safe.
class GroupRun {
 public:
  virtual ~GroupRun() = default;
  GroupRun(const GroupRun&) = delete;
  GroupRun& operator=(const GroupRun&) = delete;

  // Once `stop` is true, no further operation is started and the run is over with kAborted.
  // Throws nothing: exceptions of allocate_output and of memory become the status.
  Progress Advance();

  // Withdraws the operation that is under way, where the run has failed or the job has: before the
  // memory that it refers to, some of which is the run's, may go. Only status() and task() follow.
  void Drop() { operation_.reset(); }

  // Precondition: over.
  const core::Status& status() const { return status_; }
  const GroupTaskPtr& task() const { return task_; }

  // Makes the run of the task; one that fails where memory is lacking for it.
  static std::unique_ptr<GroupRun> Make(const RunContext& context);

 protected:
  explicit GroupRun(const RunContext& context);

  // The last operation has finished (or none has been started yet): takes its result and begins the
  // next. May return without having begun one, to be called again. False if none is left, or Fail
  // was called.
  virtual bool Next() = 0;

  // `start` gives an operation of the backend.
  template <typename Start>
  void Begin(const Start& start) {
    if (trace_.on()) trace_.Move(backend_.name());
    operation_ = start();
  }
  template <typename Start>
  void BeginRootless(const Start& start) {
    if (trace_.on()) trace_.Move(rootless_.name());
    operation_ = start();
  }
  bool Fail(core::StatusCode code, std::string text);  // false

  Channel channel() const { return task_->channel; }
  std::int64_t members() const { return members_; }
  std::int64_t self() const { return self_; }  // this rank's index among the members
  // The root's index, for the kinds that have one: it is a member and has not joined.
  std::int64_t root() const { return root_; }
  bool is_root() const { return root_ == self_; }
  // The members that have not joined, ascending: those that give and take something.
  const std::vector<std::int64_t>& active();

  Backend& backend_;
  Rootless& rootless_;
  Staging& staging_;
  // A run says what it does between its operations; that it moves data, Begin says.
  GroupTrace trace_;

 private:
  // Why the group cannot be run at all, whatever kind it is.
  core::Status Check() const;
  Progress AdvanceOrThrow();
  static std::unique_ptr<GroupRun> MakeOrThrow(const RunContext& context);

  const GroupTaskPtr task_;
  const std::atomic<bool>& stop_;
  const std::int64_t members_;
  const std::int64_t self_;
  const std::int64_t root_;
  std::vector<std::int64_t> active_;  // made when it is asked for
  std::unique_ptr<Completion> operation_;
  core::Status status_;
  bool over_ = false;
};

}  // namespace sirtaki::ops
