// What the host lanes consist of. For the files that make up ops::HostLanes only.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"
#include "ops/base/staging.h"
#include "ops/groups/group_run.h"
#include "ops/groups/lane_task.h"
#include "ops/host/host_lanes.h"
#include "ops/host/p2p.h"

namespace sirtaki::ops {

struct HostLanes::Impl {
  struct Numbered {
    std::uint64_t number;
    LaneTask task;
  };
  struct InFlight {
    std::uint64_t number = 0;
    std::uint64_t begun = 0;  // how many of the small lane began before it
    std::unique_ptr<Staging> staging;
    std::unique_ptr<GroupRun> run;
  };
  // What the large lane's thread does.
  enum class ThreadState : std::uint8_t { kWaiting, kRunning, kCallingOut, kGone };

  Impl(HostLanesOptions lane_options, Backend& lane_backend)
      : options(std::move(lane_options)),
        backend(lane_backend),
        pool(lane_backend.memory()),
        sets(options.sets),
        messages(options.rank, lane_backend) {}

  // ---- by anyone ----
  void Enqueue(const LaneTask& task) SIRTAKI_EXCLUDES(mutex);
  // It is over: completes its handles, or ends both lanes.
  void Finish(std::uint64_t number, const LaneTask& task, const core::Status& status)
      SIRTAKI_EXCLUDES(mutex);
  // Ends both lanes, once. `tensor`: of the failure; none for Abandon.
  void Stop(const core::Status& reason, const std::optional<std::string>& tensor)
      SIRTAKI_EXCLUDES(mutex);

  // ---- under the token ----
  bool StepSmall();
  void End(InFlight over) SIRTAKI_EXCLUDES(mutex);
  bool StepP2p() SIRTAKI_EXCLUDES(mutex);

  // ---- the large lane's thread ----
  void RunLargeLane() SIRTAKI_EXCLUDES(mutex);
  // The next task, or none when the thread is to end.
  std::optional<Numbered> NextLarge() SIRTAKI_EXCLUDES(mutex);
  // False when the destructor has left: nothing outside may be called.
  bool BeginCallOut() SIRTAKI_EXCLUDES(mutex);

  // Whether the first task of the queue may begin: a set goes when its small groups have gone, a
  // group waits for its inputs.
  bool LargeIsReady() const SIRTAKI_REQUIRES(mutex);
  bool LargeAwaitsInputs() const SIRTAKI_REQUIRES(mutex);
  core::Status Change(const SetChange& change) SIRTAKI_EXCLUDES(mutex);

  static fusion::Cutting LargeCutting(const GroupTask& task) {
    return {.chunk_bytes = task.chunk_bytes, .direct_bytes = task.chunk_bytes};
  }

  const HostLanesOptions options;
  Backend& backend;
  std::atomic<bool> stopped{false};  // set under the mutex

  // Under the token.
  fusion::Limits limits = options.limits;
  std::int64_t chunk_bytes = options.chunk_bytes;
  std::uint64_t groups = 0;  // started so far
  std::deque<Numbered> small_queue;
  std::vector<InFlight> small;  // oldest first
  std::uint64_t small_begun = 0;
  StagingPool pool;

  mutable core::Mutex mutex;
  core::CondVar changed;
  core::Status why SIRTAKI_GUARDED_BY(mutex);  // stopped
  std::uint64_t next_number SIRTAKI_GUARDED_BY(mutex) = 0;
  std::map<core::SetNumber, core::RankRanges> sets SIRTAKI_GUARDED_BY(mutex);
  // Everything that is queued or runs, by number.
  std::map<std::uint64_t, LaneTask> unfinished SIRTAKI_GUARDED_BY(mutex);
  std::vector<core::RunningOperation> dropped SIRTAKI_GUARDED_BY(mutex);  // by Stop
  std::deque<Numbered> large_queue SIRTAKI_GUARDED_BY(mutex);
  ThreadState thread_state SIRTAKI_GUARDED_BY(mutex) = ThreadState::kWaiting;
  bool quit SIRTAKI_GUARDED_BY(mutex) = false;  // the destructor has begun
  bool left SIRTAKI_GUARDED_BY(mutex) = false;  // and has gone without the thread
  std::thread thread;                           // the constructor's and the destructor's

  P2p messages;  // has a lock of its own
};

}  // namespace sirtaki::ops
