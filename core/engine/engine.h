// The engine of one rank: moves work from the queue through the negotiation to the executor.
//
// Whoever holds the engine's token (one mutex) runs it: the background thread when it is woken, or
// a thread that waits for a handle and drives the engine itself meanwhile, so that a small
// operation pays no thread hop. Nobody sleeps with the token. docs/architecture.md, "Threads", has
// the rules.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/thread_annotations.h"
#include "core/engine/call_trace.h"
#include "core/engine/engine_options.h"
#include "core/engine/executor.h"
#include "core/engine/handle_hooks.h"
#include "core/engine/pauses.h"
#include "core/engine/tensor_queue.h"
#include "core/protocol/negotiator.h"
#include "core/protocol/transport.h"
#include "core/threads/callers.h"
#include "core/threads/cooling.h"
#include "core/threads/parking.h"
#include "core/threads/stuck_watch.h"
#include "core/trace/flight_record.h"

namespace sirtaki::core {

class Engine {
 public:
  // References must outlive the engine. `negotiator` is touched under the token only.
  Engine(EngineOptions options, Transport& transport, Negotiator& negotiator, TensorQueue& queue,
         Executor& executor);
  ~Engine();  // precondition: the thread was stopped, nobody is in a call
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // ---- by any thread ----

  // Accepts work; see TensorQueue::Push for errors. `will_wait`: the caller is about to Wait for
  // it, so the background thread is not woken. Makes the work's handle if it has none. A refused
  // one's handle is complete, with the refusal.
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

  // From a data thread: closes the queue with the cause, posts it to the engine and rings.
  void PostFailure(const Status& why, const std::string& tensor);

  // Something moved that only a round can see (the large lane finished): wakes whoever drives.
  void Ring();

  // What this rank waits for, runs, and did last: rank, host, fault, now, sets, pending, running,
  // events and lost. Of a rank that has failed what is pending and running is as it was then. An
  // engine that gives up its token within `patience` tells all; of one that is stuck `missing` says
  // what could not be had.
  trace::FlightRecord Describe(Duration patience) const SIRTAKI_EXCLUDES(token_);

  // Waits until this rank runs nothing. kTimedOut at `deadline`; messages do not count.
  Status WaitUntilIdle(TimePoint deadline);
  // From Pause to Resume nobody drives the engine: what is submitted waits, and Listen alone receives.
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
  void WhilePaused(const std::function<void()>& call) SIRTAKI_EXCLUDES(token_);

  Status fault() const;  // ok while there is none
  // For work of this key. The handle may outlive the engine.
  HandlePtr MakeHandle(const Key& key);

  // A set that the negotiator has known from its start, and that the executor is to make.
  void AddFirstSet(SetNumber set, const RankRanges& members, WorkPtr work) SIRTAKI_EXCLUDES(token_);

  // ---- the background thread ----
  void StartThread();
  // Joins; afterwards nobody drives but explicit RunOnce. Idempotent. When stuck() it leaves the
  // thread behind: then the engine, and all that it refers to, must stay for the life of the
  // process.
  void StopThread();
  bool stuck() const { return stuck_.load(std::memory_order_acquire); }
  Duration stuck_limit() const { return options_.stuck_limit; }
  // A thread that waits for the one that has the token calls this now and then: that one may be
  // stuck, which is then a fault.
  void LookIfStuck(StuckWatch* watch);

  // ---- tests; they take the token ----
  // One round, as drivers make them: queue -> negotiator <-> transport -> executor. True if anything
  // moved. `waited_for`: as a thread does that waits; else as the background thread, which holds new
  // work.
  bool RunOnce(bool waited_for = true) SIRTAKI_EXCLUDES(token_);
  TimePoint NextWake(TimePoint now) const SIRTAKI_EXCLUDES(token_);
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  // By the negotiator, under the token, for the answer to a stall query: what this rank did last,
  // and the key before whose end it submits nothing, where it has waited for that a while.
  std::string Activity() const;
  std::optional<Key> WaitsFor() const;

 private:
  // What other threads ask for; carried out in the next round.
  struct Command {
    enum class Kind : std::uint8_t { kFault, kLeave };
    Kind kind = Kind::kFault;
    StatusCode code = StatusCode::kAborted;
    std::string text;
    std::string tensor;
    Origin origin;
  };
  // A call with a time-out of its own.
  struct TimedCall {
    Key key;
    Duration limit{};
    HandlePtr handle;
    bool asked = false;  // who misses it
  };
  struct Nap {
    bool needed = false;
    std::uint64_t ticket = 0;
    TimePoint until{};
    bool holding = false;
  };

  static constexpr int kHoldFactor = 10;

  // How often the lanes are asked what they run: to notice lost peers, so it may be coarse.
  static constexpr Duration kRunningInterval = std::chrono::milliseconds(50);

  // Counts as one call of the token's holder for as long as it lives.
  class CallMark;
  class Sitting;

  // ---- engine.cc: one round; engine_end.cc: commands, and the end ----
  // `waited_for`: somebody waits, so nothing is held.
  bool Round(TimePoint now, bool waited_for) SIRTAKI_REQUIRES(token_);
  bool GuardedRound(TimePoint now, bool waited_for) SIRTAKI_REQUIRES(token_);
  bool Holds(TimePoint now) SIRTAKI_REQUIRES(token_);
  TimePoint HeldUntil() const SIRTAKI_REQUIRES(token_);
  bool SubmitNew(TimePoint now) SIRTAKI_REQUIRES(token_);
  std::vector<Command> TakeCommands() SIRTAKI_REQUIRES(token_);
  void CarryOut(const std::vector<Command>& commands, TimePoint now) SIRTAKI_REQUIRES(token_);
  bool ReceiveSome(TimePoint now) SIRTAKI_REQUIRES(token_);
  void Receive(const Incoming& incoming, TimePoint now) SIRTAKI_REQUIRES(token_);
  void CheckDeadlines(TimePoint now) SIRTAKI_REQUIRES(token_);
  void CallIsLate(TimedCall call, TimePoint now) SIRTAKI_REQUIRES(token_);
  void CheckHeldWork(TimePoint now) SIRTAKI_REQUIRES(token_);
  void Watch(const WorkPtr& work) SIRTAKI_REQUIRES(token_);
  void StepNegotiator(TimePoint now) SIRTAKI_REQUIRES(token_);
  bool SendOutgoing() SIRTAKI_REQUIRES(token_);
  bool StartBatches(TimePoint now) SIRTAKI_REQUIRES(token_);
  bool StartBatch(DecidedBatch decided, TimePoint now) SIRTAKI_REQUIRES(token_);
  WorkPtr TakeInHand(const Key& key) SIRTAKI_REQUIRES(token_);
  void FailInHand(const Status& why) SIRTAKI_REQUIRES(token_);
  void StartItems(std::vector<RunItem> items, const RunBatch& of, TimePoint now)
      SIRTAKI_REQUIRES(token_);
  static void AddItems(DecidedRun run, const WorkPtr& work, RunBatch* batch);
  void NoticeFault() SIRTAKI_REQUIRES(token_);
  Status InWords(const Status& why) const;
  void NoticeEnd(TimePoint now) SIRTAKI_REQUIRES(token_);
  void PostFault(StatusCode code, const std::string& text, const std::string& tensor);
  void PostFault(StatusCode code, const std::string& text, const std::string& tensor,
                 const Origin& origin);
  void Post(Command command);

  // ---- engine_record.cc ----
  bool TakeTokenWithin(Duration patience) const SIRTAKI_TRY_ACQUIRE(true, token_);

  // ---- engine_wait.cc: who drives, who sleeps ----
  template <typename Done>
  void DriveUntil(const Done& done, HandleState* handle, TimePoint deadline);
  template <typename Done>
  Nap DriveWhileHot(const Done& done, const void* driver, TimePoint deadline);
  template <typename Done>
  bool TakeToken(const Done& done, bool patient) SIRTAKI_TRY_ACQUIRE(true, token_);
  bool TryToken() SIRTAKI_TRY_ACQUIRE(true, token_);
  Nap NapBeforeSleep(std::uint64_t ticket, const void* driver) SIRTAKI_REQUIRES(token_);
  void StopDriving(const void* driver);
  void RunThread();
  void Park(TimePoint limit);
  void WakeSomebody();
  void Relax(bool spin) const;
  bool Outstanding() const SIRTAKI_REQUIRES(token_);
  TimePoint NextWakeUnderToken(TimePoint now) const SIRTAKI_REQUIRES(token_);
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
  Cooling cooling_ SIRTAKI_GUARDED_BY(token_);
  std::multimap<TimePoint, TimedCall> timed_calls_ SIRTAKI_GUARDED_BY(token_);
  std::size_t sweep_timed_calls_at_ SIRTAKI_GUARDED_BY(token_) = 64;
  std::optional<Key> last_submitted_ SIRTAKI_GUARDED_BY(token_);
  TimePoint last_submission_ SIRTAKI_GUARDED_BY(token_){};
  // The handles of work that has left the queue and that nobody else may have yet: an exception must
  // not lose them.
  std::vector<HandlePtr> in_hand_ SIRTAKI_GUARDED_BY(token_);
  std::uint64_t last_step_ SIRTAKI_GUARDED_BY(token_) = 0;  // that it was of, if it was a bucket
  Negotiator::LocalState local_ SIRTAKI_GUARDED_BY(token_);
  TimePoint looked_at_running_ SIRTAKI_GUARDED_BY(token_){};
  std::vector<RunningOperation> running_at_fault_ SIRTAKI_GUARDED_BY(token_);
  bool flushed_ SIRTAKI_GUARDED_BY(token_) = true;
  std::optional<TimePoint> ended_since_ SIRTAKI_GUARDED_BY(token_);  // the negotiator is closed
  Cause noticed_cause_ SIRTAKI_GUARDED_BY(token_);
  TimePoint duty_until_ SIRTAKI_GUARDED_BY(token_){};
  // New work that is held.
  struct Hold {
    TimePoint since{};
    TimePoint last{};  // when more was seen
    std::size_t works = 0;
  };
  Duration fusion_delay_ SIRTAKI_GUARDED_BY(token_);
  std::optional<Hold> hold_ SIRTAKI_GUARDED_BY(token_);
  // The background thread sleeps and comes back by itself for the work that it holds.
  std::atomic<bool> holding_{false};
  std::atomic<bool> urgent_{false};  // some of the new work must not be held

  Mutex commands_mutex_;
  std::vector<Command> commands_ SIRTAKI_GUARDED_BY(commands_mutex_);
  std::atomic<bool> has_commands_{false};

  mutable Mutex fault_mutex_;
  Status fault_ SIRTAKI_GUARDED_BY(fault_mutex_);
  std::atomic<bool> has_fault_{false};   // fault_ is not ok
  std::atomic<bool> faulted_{false};     // the negotiator has the fault, everything here is failed
  std::atomic<bool> fault_told_{false};  // and it has left this process
  std::atomic<bool> closed_{false};

  // Who drives. `duty_` is the driver that comes back in time for timers and polls, so that the
  // others may sleep until something rings.
  std::atomic<int> drivers_{0};
  std::atomic<std::uint64_t> driver_changes_{0};
  std::atomic<const void*> duty_{nullptr};
  // As the last holder of the token left it.
  std::atomic<bool> outstanding_{false};
  std::atomic<Duration::rep> next_wake_{0};
  // When the background thread comes back by itself; the smallest value while it is awake.
  std::atomic<Duration::rep> background_until_;
  std::atomic<std::uint64_t> rounds_{0};  // begun or ended: odd within one
  std::atomic<bool> stuck_{false};
  Pauses pauses_;  // begin under the token
  Parking parking_;
  std::atomic<bool> parked_long_{false};
  Callers callers_;
  std::atomic<const HandleState*> sits_in_{nullptr};  // compared only
  std::atomic<Duration::rep> sits_since_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace sirtaki::core
