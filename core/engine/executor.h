// An executor carries out decided work: ops/lanes and ops/host/host_lanes; tests have their own.
// The engine hands over batches in the agreed order.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/engine/work.h"
#include "core/protocol/message.h"
#include "core/protocol/request.h"

namespace sirtaki::core {

// An item is what runs under one key: a tensor, or the parts of a grouped call or a bucket. The
// executor ends it by HandleState::EndPiece.
struct RunItem : DecidedRun {
  WorkPtr work = nullptr;  // null: this rank has joined and contributes the identity
};

// A batch is started together, at one place of a set's order.
struct RunBatch {
  SetNumber set = kWorldSet;
  std::uint64_t number = 0;  // the same on all members
  MembersPtr members;        // of the set
  Limits limits;             // to plan with, the same on all members
  std::vector<RunItem> items;
};

class Executor {
 public:
  virtual ~Executor() = default;

  // Start is called under the token. Preconditions: this rank is a member, and at every member
  // AddSet of the set has ended. Plans the batch alone and queues or starts its groups in order;
  // never blocks.
  virtual void Start(RunBatch batch, TimePoint now) = 0;

  // AddSet is called under the token: a set comes or goes, at its place in the agreed order: what
  // was started before for a set that goes is done first. `members`: of a new one. `work`: whose
  // handle is completed when it has happened; its request is that of the change.
  virtual void AddSet(SetNumber set, const RankRanges& members, WorkPtr work, TimePoint now) = 0;
  virtual void RemoveSet(SetNumber set, WorkPtr work, TimePoint now) = 0;

  // StartP2p begins, under the token, a send or a receive, which is in no order with the rest.
  virtual void StartP2p(WorkPtr work, TimePoint now) = 0;

  // Step moves on, under the token, what is non-blocking; true if something moved.
  virtual bool Step() = 0;

  // True if non-blocking calls are unfinished, so that somebody has to keep calling Step.
  virtual bool NeedsStepping() const = 0;

  // True if some of them do not ring when they progress: Step has to be called at intervals.
  virtual bool NeedsPolling() const = 0;

  // True if nothing is queued or running on any lane. Messages do not count: a session may end with
  // them, and a message for which its peer never calls completes with kShutDown. Thread-safe.
  virtual bool Idle() const = 0;

  // Lists what runs or waits in the lanes now, and messages, oldest first; when they were abandoned
  // or have failed, what did then. Thread-safe.
  virtual std::vector<RunningOperation> Running() const = 0;

  // After a fault: nothing starts any more; what is queued completes with `why`, and so do the
  // handles of what runs (its memory stays alive until the operation returns, if ever). Never
  // blocks. Thread-safe: whoever has the token may be stuck.
  virtual void Abandon(const Status& why) = 0;
};

}  // namespace sirtaki::core
