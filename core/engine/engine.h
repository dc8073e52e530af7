// The engine of one rank: moves work from the queue through the negotiation to the executor.
//
// The thread that holds the engine's token (one mutex) makes its rounds: the background thread when it
// is woken, or a thread that waits for a handle and drives the engine itself meanwhile, so that a
// small operation pays no thread hop. core/engine/driver has the rules.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/base/thread_annotations.h"
#include "core/engine/call_trace.h"
#include "core/engine/driver.h"
#include "core/engine/engine_fault.h"
#include "core/engine/engine_options.h"
#include "core/engine/executor.h"
#include "core/engine/handle_hooks.h"
#include "core/engine/hold.h"
#include "core/engine/inbox.h"
#include "core/engine/pauses.h"
#include "core/engine/peer_watch.h"
#include "core/engine/tensor_queue.h"
#include "core/engine/timed_calls.h"
#include "core/protocol/negotiator.h"
#include "core/protocol/transport.h"
#include "core/threads/callers.h"
#include "core/threads/stuck_watch.h"
#include "core/trace/flight_record.h"

namespace sirtaki::core {

class Engine : private Rounds {
 public:
  // References must outlive the engine. `negotiator` is touched under the token only.
  Engine(EngineOptions options, Transport& transport, Negotiator& negotiator, TensorQueue& queue,
         Executor& executor);
  ~Engine() override;  // precondition: the thread was stopped, nobody is in a call
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // ---- by any thread ----

  // Submit makes the handle if there is none; a refused work's is complete. Errors: TensorQueue::Push's.
  // `will_wait`: the caller is about to Wait for it, so the background thread is not woken.
  Status Submit(const WorkPtr& work, bool will_wait);

  // Drives or sleeps until the handle is done, and gives its status. kTimedOut at `deadline` (the
  // work stays submitted).
  Status Wait(HandleState& handle, TimePoint deadline);

  // The calling thread makes calls to this engine, though it is in none now.
  void NoteCaller() { callers_.Note(); }

  // Says that this rank takes part in nothing more, and waits until every rank has said so and the
  // tree is drained, or until a fault. Returns the fault's status if there was one. What is
  // submitted later completes with kNotInitialized.
  Status Leave(const std::string& why);

  // Tells every rank; every pending and later call fails with this cause. Returns when the word has
  // left this process, or after two seconds.
  void Abort(StatusCode code, const std::string& text);

  // PostFailure fails what is pending here with this cause, and wakes whoever makes the round that
  // tells the other ranks.
  void PostFailure(const Status& failure, const std::string& tensor);

  // Something moved that only a round can see (the large lane finished): wakes whoever drives.
  void Ring() { transport_.Wake(); }

  // The record says what this rank waits for, runs, and did last; after a fault, what it waited for
  // and ran then. Where the engine does not give up its token within `patience`, the record's
  // `missing` says what could not be had.
  trace::FlightRecord Describe(Duration patience) const SIRTAKI_EXCLUDES(token_);

  // Waits until this rank runs nothing. kTimedOut at `deadline`; messages do not count.
  Status WaitUntilIdle(TimePoint deadline);
  // Nobody drives the engine from Pause to Resume: what is submitted waits, Listen alone receives.
  // False: something runs, or the engine is about to end, and it is not paused. Leave and Abort
  // resume.
  bool Pause() SIRTAKI_EXCLUDES(token_);
  void Resume();
  // Makes one round of a paused engine, by the thread that has paused it: takes in what other ranks
  // say, above all a fault, and starts nothing. Does nothing for an engine that is not paused.
  void Listen() SIRTAKI_EXCLUDES(token_);
  // Other ranks may be paused while this one is not: until that is over none is taken for lost.
  void ExpectPauses(bool elsewhere) { pauses_.ExpectElsewhere(elsewhere); }

  // Runs `call` while nobody drives the engine, so that no other call to the medium is made by it.
  // One that does not return is found as any call is in which the engine is stuck.
  void WhileNobodyDrives(const std::function<void()>& call) SIRTAKI_EXCLUDES(token_) {
    driver_.WhileNobodyDrives(call);
  }

  Status fault() const { return fault_.status(); }  // ok while there is none
  // The limits plan what is started from now on.
  const AgreedLimits& limits() const { return limits_; }
  // MakeHandle makes one for work of this key. The handle may outlive the engine.
  HandlePtr MakeHandle(const Key& key);

  // A set that the negotiator has known from its start, and that the executor is to make.
  void AddFirstSet(SetNumber set, const RankRanges& members, WorkPtr work) SIRTAKI_EXCLUDES(token_);

  // ---- the background thread ----
  void StartThread() { driver_.StartThread(); }
  // Joins; afterwards nobody drives but explicit RunOnce. Idempotent. When stuck() it leaves the
  // thread behind: then the engine, and all that it refers to, must stay for the life of the
  // process.
  void StopThread();
  bool stuck() const { return driver_.stuck(); }
  Duration stuck_limit() const { return options_.stuck_limit; }
  // A thread that waits for the one that has the token calls this now and then: that one may be
  // stuck, which is then a fault.
  void LookIfStuck(StuckWatch* watch) { driver_.LookIfStuck(watch); }

  // ---- tests; they take the token ----
  // One round, as drivers make them; true if anything moved. `waited_for`: as a thread does that
  // waits; else as the background thread, which holds new work.
  bool RunOnce(bool waited_for = true) SIRTAKI_EXCLUDES(token_);
  TimePoint NextWake(TimePoint now) const SIRTAKI_EXCLUDES(token_);
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  // Activity is asked by the negotiator, under the token, for the answer to a stall query: what
  // this rank did last, and the key before whose end it submits nothing, where it has waited for
  // that a while.
  std::string Activity() const;
  std::optional<Key> WaitsFor() const;

 private:
  // A command is a fault that another thread has seen, or why the rank leaves; the next round carries
  // it out.
  using Command = std::variant<Status, std::string>;
  // Work that was taken out of the queue.
  struct Submission {
    Key key;
    TimePoint at{};
    std::uint64_t step = 0;  // that it was of, if it was a bucket
  };
  // A seat says what a thread waits in, and since when.
  struct Seat {
    std::atomic<const HandleState*> handle{nullptr};  // compared only
    std::atomic<Duration::rep> since{0};
  };
  // How often the lanes are asked what they run: to notice lost peers, so it may be coarse.
  static constexpr Duration kRunningInterval = std::chrono::milliseconds(50);

  class Sitting;

  // ---- for the driver: engine.cc; engine_wait.cc ----
  bool Round(TimePoint now, bool waited_for) override SIRTAKI_REQUIRES(token_);
  Plan NextRound(TimePoint now) const override SIRTAKI_REQUIRES(token_);
  bool Paused() const override { return pauses_.here(); }
  bool HasNew() const override { return commands_.any() || queue_.HasNew(); }
  Status OnStuck() override;

  // ---- engine.cc: one round; engine_end.cc: commands, and the end ----
  bool UnguardedRound(TimePoint now, bool waited_for) SIRTAKI_REQUIRES(token_);
  bool Holds(TimePoint now) SIRTAKI_REQUIRES(token_);
  bool SubmitNew(TimePoint now) SIRTAKI_REQUIRES(token_);
  void CarryOut(const std::vector<Command>& commands, TimePoint now) SIRTAKI_REQUIRES(token_);
  bool ReceiveSome(TimePoint now) SIRTAKI_REQUIRES(token_);
  void Receive(const Incoming& incoming, TimePoint now) SIRTAKI_REQUIRES(token_);
  void CheckDeadlines(TimePoint now) SIRTAKI_REQUIRES(token_);
  void CallIsLate(TimedCall call, TimePoint now) SIRTAKI_REQUIRES(token_);
  void CheckHeldWork(TimePoint now) SIRTAKI_REQUIRES(token_);
  void LookAtPeers(TimePoint now) SIRTAKI_REQUIRES(token_);
  void Watch(const WorkPtr& work) SIRTAKI_REQUIRES(token_);
  void StepNegotiator(TimePoint now) SIRTAKI_REQUIRES(token_);
  void TellStalls(const std::vector<StallWarning>& warnings, TimePoint now)
      SIRTAKI_REQUIRES(token_);
  bool Send(std::vector<Outgoing> outgoing) SIRTAKI_REQUIRES(token_);
  bool StartBatches(std::vector<DecidedBatch> batches) SIRTAKI_REQUIRES(token_);
  // Start carries out an entry, gathering what runs in `batch`. False: it makes no sense, a fault.
  bool StartBatch(DecidedBatch decided, TimePoint now) SIRTAKI_REQUIRES(token_);
  bool Misses(const Key& key, bool has_submitted = false) SIRTAKI_REQUIRES(token_);  // false
  bool Start(DecidedRun& run, RunBatch& batch, TimePoint now) SIRTAKI_REQUIRES(token_);
  bool Start(const DecidedFail& fail, RunBatch& batch, TimePoint now) SIRTAKI_REQUIRES(token_);
  bool Start(const DecidedJoin& join, RunBatch& batch, TimePoint now) SIRTAKI_REQUIRES(token_);
  bool Start(const AddSetEntry& added, RunBatch& batch, TimePoint now) SIRTAKI_REQUIRES(token_);
  bool Start(const RemoveSetEntry& removed, RunBatch& batch, TimePoint now)
      SIRTAKI_REQUIRES(token_);
  bool Start(const LimitsEntry& change, RunBatch& batch, TimePoint now) SIRTAKI_REQUIRES(token_);
  bool Start(const AssemblyEntry& assembly, RunBatch& batch, TimePoint now)
      SIRTAKI_REQUIRES(token_);
  WorkPtr TakeInHand(const Key& key) SIRTAKI_REQUIRES(token_);
  WorkPtr TakeAgreed(const Key& key, const RunBatch& batch, TimePoint now) SIRTAKI_REQUIRES(token_);
  void FailInHand(const Status& why) SIRTAKI_REQUIRES(token_);
  void NoticeFault() SIRTAKI_REQUIRES(token_);
  Status InWords(const Status& why) const;
  void NoticeEnd(TimePoint now) SIRTAKI_REQUIRES(token_);
  void Post(Command command);

  // ---- engine_record.cc ----
  bool TakeTokenWithin(Duration patience) const SIRTAKI_TRY_ACQUIRE(true, token_);

  bool Outstanding() const SIRTAKI_REQUIRES(token_);
  TimePoint Now() const { return options_.now(); }

  const EngineOptions options_;
  const CallTrace trace_;
  Transport& transport_;
  Negotiator& negotiator_ SIRTAKI_GUARDED_BY(token_);
  TensorQueue& queue_;
  Executor& executor_;
  const std::shared_ptr<HandleHooks> hooks_;

  // Lock order: token -> queue -> handle; the other mutexes here are leaves.
  mutable Mutex token_;
  TimedCalls timed_calls_ SIRTAKI_GUARDED_BY(token_);
  std::optional<Submission> last_submission_ SIRTAKI_GUARDED_BY(token_);
  // The handles of work that has left the queue and that nobody else may have yet: an exception must
  // not lose them.
  std::vector<HandlePtr> in_hand_ SIRTAKI_GUARDED_BY(token_);
  Negotiator::LocalState local_ SIRTAKI_GUARDED_BY(token_);
  TimePoint looked_at_running_ SIRTAKI_GUARDED_BY(token_){};
  std::vector<RunningOperation> running_at_fault_ SIRTAKI_GUARDED_BY(token_);
  std::string doing_at_fault_ SIRTAKI_GUARDED_BY(token_);
  std::int64_t calls_ended_ SIRTAKI_GUARDED_BY(token_) = 0;  // that the trace was not told of
  bool flushed_ SIRTAKI_GUARDED_BY(token_) = true;
  std::optional<TimePoint> ended_since_ SIRTAKI_GUARDED_BY(token_);  // the negotiator is closed
  Cause noticed_cause_ SIRTAKI_GUARDED_BY(token_);
  Hold hold_ SIRTAKI_GUARDED_BY(token_);
  PeerWatch peers_ SIRTAKI_GUARDED_BY(token_);
  std::atomic<bool> urgent_{false};  // some of the new work must not be held

  Inbox<Command> commands_;
  AgreedLimits limits_;  // change under the token

  EngineFault fault_;
  std::atomic<bool> closed_{false};

  Pauses pauses_;  // begin under the token
  Callers callers_;
  Seat sits_in_;
  Driver driver_;
};

}  // namespace sirtaki::core
