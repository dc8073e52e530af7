// How callers of the engine wait, and when its next round is due.
#include <algorithm>

#include "core/base/text.h"
#include "core/engine/engine.h"

namespace sirtaki::core {

namespace {

// How long Abort and StopThread wait for the word of a fault to leave this process.
constexpr Duration kTellingTime = std::chrono::seconds(2);

}  // namespace

// ---- what callers see ----

// The calling thread waits for this handle, and for as long as that takes; null: it does not.
class Engine::Sitting {
 public:
  Sitting(Engine& engine, const HandleState* handle, TimePoint since) : engine_(engine) {
    if (handle == nullptr) return;
    engine_.sits_in_.since = since.time_since_epoch().count();
    engine_.sits_in_.handle = handle;
  }
  ~Sitting() { engine_.sits_in_.handle = nullptr; }
  Sitting(const Sitting&) = delete;
  Sitting& operator=(const Sitting&) = delete;

 private:
  Engine& engine_;
};

Status Engine::Wait(HandleState& handle, TimePoint deadline) {
  if (!handle.done()) {
    const TimePoint begin = Now();
    trace_.BeginWait(begin);
    callers_.Note();
    const Sitting sitting(*this, deadline == TimePoint::max() ? &handle : nullptr, begin);
    driver_.DriveUntil([&] { return handle.done() || stuck(); }, &handle, deadline);
    trace_.Waited(handle, begin, Now());
  }
  // Nobody else completes what a stuck call has in hand.
  if (!handle.done() && stuck()) handle.Complete(fault());
  return handle.AfterWait();
}

Status Engine::WaitUntilIdle(TimePoint deadline) {
  bool idle = false;  // it was: another thread's next call may have begun since
  driver_.DriveUntil([&] { return (idle = executor_.Idle()) || fault_.failed() || stuck(); },
                     nullptr, deadline);
  if (Status why = fault(); !why.ok()) return why;
  return idle ? Status::Ok() : Status(StatusCode::kTimedOut, "operations are still under way");
}

bool Engine::Pause() SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
  StuckWatch watch(options_.stuck_limit);
  while (!TakeTokenWithin(kRunningInterval)) {
    LookIfStuck(&watch);
    if (stuck()) return false;
  }
  const bool paused = executor_.Idle() && !fault_.known() && pauses_.Begin();
  token_.Unlock();
  return paused;
}

void Engine::Resume() {
  pauses_.End();
  driver_.WakeSomebody();
}

// An abort may have ended the pause, and then whoever has the token may hold it for ever.
void Engine::Listen() SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
  if (!pauses_.here() || !token_.TryLock()) return;
  if (pauses_.here()) driver_.MakeRound(Now(), /*waited_for=*/false);
  token_.Unlock();
}

Status Engine::Leave(const std::string& why) {
  pauses_.EndForGood();  // Post wakes
  Post(why);
  driver_.DriveUntil([this] { return closed_ || fault_.failed() || stuck(); }, nullptr,
                     TimePoint::max());
  return fault();
}

void Engine::Abort(StatusCode code, const std::string& text) {
  pauses_.EndForGood();
  PostFailure({code, text}, {});
  driver_.DriveUntil([this] { return closed_ || fault_.told() || stuck(); }, nullptr,
                     Now() + kTellingTime);
}

// ---- for the driver ----

Status Engine::OnStuck() {
  const std::string in = options_.stuck_in ? options_.stuck_in() : "";
  PostFailure({StatusCode::kBackend,
               "this rank's engine has been stuck in one call for " +
                   DurationText(options_.stuck_limit) + (in.empty() ? "" : " (" + in + ")") +
                   ": MPI may block so when a peer on another host dies, and a program must not " +
                   "wait while it has an MpiGate"},
              {});
  Status why = fault();
  trace_.Failed(why, Now());
  if (options_.on_stuck) options_.on_stuck();
  return why;
}

bool Engine::Outstanding() const {
  if (closed_) return false;
  if (fault_.failed()) return !fault_.told();
  return negotiator_.Outstanding() || !executor_.Idle() || executor_.NeedsStepping() ||
         queue_.pending() > 0;
}

TimePoint Engine::NextWake(TimePoint now) const SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
  MutexLock lock(token_);
  return driver_.NextWake(now, NextRound(now));
}

Rounds::Plan Engine::NextRound(TimePoint now) const {
  Plan plan;
  plan.outstanding = Outstanding();
  if (closed_) return plan;
  const std::optional<TimePoint> held_until = hold_.until();
  plan.holds = held_until.has_value();
  plan.wake = std::min({negotiator_.NextDeadline(), timed_calls_.earliest(),
                        queue_.EarliestDeadline(nullptr), held_until.value_or(TimePoint::max())});
  const bool busy = !fault_.failed() && (!executor_.Idle() || executor_.NeedsStepping());
  if (busy) plan.wake = std::min(plan.wake, now + kRunningInterval);
  if (plan.outstanding && !fault_.failed()) plan.wake = std::min(plan.wake, peers_.next());
  plan.polls = !transport_.ArrivalsRing() || !flushed_ || (busy && executor_.NeedsPolling());
  return plan;
}

// ---- the background thread ----

void Engine::StopThread() {
  if (!driver_.has_thread()) return;
  if (fault_.failed() && !fault_.told() && !stuck()) {
    driver_.DriveUntil([this] { return fault_.told(); }, nullptr, Now() + kTellingTime);
  }
  driver_.StopThread();
}

}  // namespace sirtaki::core
