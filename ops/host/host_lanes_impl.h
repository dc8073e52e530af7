// HostLanes::Impl is what the host lanes consist of, for the files that make them up only.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"
#include "ops/base/staging.h"
#include "ops/groups/group_run.h"
#include "ops/groups/lane.h"
#include "ops/groups/lane_task.h"
#include "ops/host/host_lanes.h"
#include "ops/host/p2p.h"

namespace sirtaki::ops {

// Small tasks are stepped under the token, the others are the thread's.
struct HostLanes::Impl : Lane<LaneTask> {
  struct InFlight {
    LaneTask task;
    std::uint64_t begun = 0;  // how many of the small lane began before it
    std::unique_ptr<Staging> staging;
    std::unique_ptr<GroupRun> run;
  };
  // Keeps what the medium may still write to after a failure.
  static void Keep(const GroupTask& task, std::shared_ptr<void> what);

  Impl(HostLanesOptions lane_options, Backends& lane_backend)
      : Lane(lane_options.on_failure),
        options(std::move(lane_options)),
        backend(lane_backend),
        pool(lane_backend.memory()),
        messages(options.rank, lane_backend) {}

  // ---- by anyone ----
  void Enqueue(LaneTask task) SIRTAKI_EXCLUDES(mutex);
  void EnqueueChange(SetChange change) SIRTAKI_EXCLUDES(mutex) {
    Enqueue({nullptr, std::make_shared<const SetChange>(std::move(change))});
  }
  // Completes the handles of a task that is over, or ends both lanes.
  void Conclude(const LaneTask& task, const core::Status& status) SIRTAKI_EXCLUDES(mutex);
  // Ends both lanes, once. `tensor`: of the failure; none for Abandon.
  void Stop(const core::Status& reason, const std::optional<std::string>& tensor)
      SIRTAKI_EXCLUDES(mutex);

  // ---- under the token ----
  bool StepSmall();
  void EndSmall(InFlight over) SIRTAKI_EXCLUDES(mutex);
  bool StepP2p() SIRTAKI_EXCLUDES(mutex);

  // ---- the large lane's thread ----
  void RunLargeLane() SIRTAKI_EXCLUDES(mutex);
  // Waits for the next task; none when the thread is to end.
  std::optional<LaneTask> NextLarge() SIRTAKI_EXCLUDES(mutex);

  // Whether the first task of the queue may begin: a set goes when its small groups have gone, a
  // group waits for its inputs.
  bool LargeIsReady() const SIRTAKI_REQUIRES(mutex);
  bool LargeAwaitsInputs() const SIRTAKI_REQUIRES(mutex);

  static fusion::Cutting LargeCutting(const GroupTask& task) {
    return {.chunk_bytes = task.limits.chunk_bytes, .direct_bytes = task.limits.chunk_bytes};
  }

  const HostLanesOptions options;
  Backends& backend;

  // These are used under the token.
  std::uint64_t groups = 0;  // started so far
  std::deque<LaneTask> small_queue;
  std::vector<InFlight> small;  // oldest first
  std::uint64_t small_begun = 0;
  StagingPool pool;

  bool large_runs SIRTAKI_GUARDED_BY(mutex) = false;  // a task is the thread's

  P2p messages;  // has a lock of its own
};

}  // namespace sirtaki::ops
