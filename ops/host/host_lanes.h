// The executor of host memory: plans each batch, then runs its groups on two lanes. Small groups
// use non-blocking operations stepped under the engine's token; large ones a thread of their own,
// which packs, reduces and unpacks chunk by chunk so that what it touches stays in the cache. A
// tensor of at least a chunk is reduced where it lies. Process sets come and go on the large lane.
// Sends and receives are stepped beside both.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/engine/executor.h"
#include "core/trace/observer.h"
#include "ops/base/backend.h"
#include "ops/groups/group_task.h"
#include "ops/host/p2p.h"

namespace sirtaki::ops {

struct HostLanesOptions {
  int rank = 0;
  bool deterministic = false;  // as fusion::Plan has it
  // An operation failed: called once, from whatever thread saw it, with the name of the tensor it
  // concerns.
  std::function<void(const core::Status& why, const std::string& tensor)> on_failure;
  // Something finished on the large lane (rings the engine's doorbell).
  std::function<void()> on_progress;
  core::trace::ObserverPtr observer;  // null: nothing is recorded
  // The medium under the backend, which a thread that is left behind there keeps alive. Null: the
  // backend needs nothing that goes earlier.
  std::shared_ptr<void> medium;
};

// Idle, Running, Abandon and the destructor are called by anyone, the rest under the engine's token.
// No lock is held while a callback, a handle or the backend is called; callbacks may come from any
// of these calls and from the large lane's thread. The first failure of an operation, or Abandon,
// ends both lanes: the backend is aborted and every handle completes with that status. The
// callbacks are not called after the destructor.
//
// A message holds up nobody: Idle does not know of it, so that a session may end with a receive for
// which nobody sent; its handle then completes with kShutDown. Running and NeedsStepping do.
class HostLanes : public core::Executor {
 public:
  // `backend` must outlive the lanes.
  HostLanes(HostLanesOptions options, Backends& backend);
  // Joins the large lane's thread if it is idle; a thread that is stuck in the medium after a fault
  // is left behind with everything it refers to. Abandons first if something is unfinished.
  ~HostLanes() override;

  void Start(core::RunBatch batch, core::TimePoint now) override;
  // Groups that were planned elsewhere.
  void StartGroups(std::vector<std::shared_ptr<GroupTask>> groups);
  void AddSet(core::SetNumber set, const core::RankRanges& members, core::WorkPtr work,
              core::TimePoint now) override;
  void RemoveSet(core::SetNumber set, core::WorkPtr work, core::TimePoint now) override;
  void StartP2p(core::WorkPtr work, core::TimePoint now) override;
  // StartP2p begins a message whose memory somebody else brings, if its carrier does not take it.
  void StartP2p(core::WorkPtr work, core::TimePoint now, P2pGate there,
                std::shared_ptr<P2pCarrier> carrier = nullptr);
  bool Step() override;
  bool NeedsStepping() const override;
  bool NeedsPolling() const override;
  bool Idle() const override;
  std::vector<core::RunningOperation> Running() const override;
  void Abandon(const core::Status& why) override;
  void EndMessages(const core::Status& why);  // all that have not ended complete with it

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace sirtaki::ops
