// Who drives the engine and who sleeps. See "Threads" in docs/architecture.md.
//
// - A driver is a thread in Wait, Leave or Abort. It drives hot while something moves; then it
//   sleeps on the doorbell until the next timer or poll. Of several drivers one has the duty to
//   come back in time.
// - The background thread parks while there are drivers, away from the doorbell; it is called back
//   by the last driver if work is left, or comes back by itself. Otherwise it does as a driver
//   does.
// - Whoever stops driving makes sure that somebody else knows when to wake.
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <utility>

#include "core/base/log.h"
#include "core/base/text.h"
#include "core/engine/engine.h"

namespace sirtaki::core {

namespace {

// Nobody sleeps longer than this, though nothing needs it: it bounds the harm of a lost wake-up.
constexpr Duration kLongestSleep = std::chrono::seconds(1);

// Of the hot time, how long is spun and not yielded. Short, for a peer may wait for this very core
// even where there are enough; a yield that finds nobody costs little.
constexpr Duration kSpinTime = std::chrono::microseconds(1);

// A driver without the duty is woken by whatever concerns it, and looks by itself this often.
constexpr Duration kOffDutySleep = std::chrono::milliseconds(100);

constexpr Duration kFirstPark = std::chrono::milliseconds(5);
constexpr Duration kLongestPark = std::chrono::milliseconds(100);

// How long Abort and StopThread wait for the word of a fault to leave this process.
constexpr Duration kTellingTime = std::chrono::seconds(2);

constexpr Duration::rep kAwake = TimePoint::min().time_since_epoch().count();

Duration::rep Count(TimePoint time) { return time.time_since_epoch().count(); }

}  // namespace

// ---- what callers see ----

// The calling thread waits for this handle, and for as long as that takes; null: it does not.
class Engine::Sitting {
 public:
  Sitting(Engine& engine, const HandleState* handle, TimePoint since) : engine_(engine) {
    if (handle == nullptr) return;
    engine_.sits_since_ = Count(since);
    engine_.sits_in_ = handle;
  }
  ~Sitting() { engine_.sits_in_ = nullptr; }
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
    DriveUntil([&handle] { return handle.done(); }, &handle, deadline);
    trace_.Waited(handle, begin, Now());
  }
  if (handle.done()) return handle.status();
  return {StatusCode::kTimedOut, "the call has not ended by the deadline of this wait"};
}

Status Engine::WaitUntilIdle(TimePoint deadline) {
  bool idle = false;  // it was: another thread's next call may have begun since
  DriveUntil([&] { return (idle = executor_.Idle()) || faulted_ || stuck_; }, nullptr, deadline);
  if (Status why = fault(); !why.ok()) return why;
  return idle ? Status::Ok() : Status(StatusCode::kTimedOut, "operations are still under way");
}

bool Engine::Pause() {
  MutexLock lock(token_);
  return executor_.Idle() && !has_fault_ && pauses_.Begin();
}

void Engine::Resume() {
  pauses_.End();
  WakeSomebody();
}

// An abort may have ended the pause, and then whoever has the token may hold it for ever.
void Engine::Listen() {
  if (!pauses_.here() || !token_.TryLock()) return;
  if (pauses_.here()) GuardedRound(Now(), /*waited_for=*/false);
  token_.Unlock();
}

Status Engine::Leave(const std::string& why) {
  pauses_.EndForGood();  // Post wakes
  Post({Command::Kind::kLeave, StatusCode::kOk, why, {}, {}});
  DriveUntil([this] { return closed_ || faulted_ || stuck_; }, nullptr, TimePoint::max());
  return fault();
}

void Engine::Abort(StatusCode code, const std::string& text) {
  pauses_.EndForGood();
  PostFault(code, text, {});
  DriveUntil([this] { return closed_ || fault_told_ || stuck_; }, nullptr, Now() + kTellingTime);
}

// ---- driving ----

template <typename Done>
void Engine::DriveUntil(const Done& done, HandleState* handle, TimePoint deadline) {
  const char driver = 0;  // its address is this driver's name
  if (drivers_.fetch_add(1, std::memory_order_seq_cst) == 0) driver_changes_.fetch_add(1);
  StuckWatch watch(options_.stuck_limit);
  while (!done() && Now() < deadline) {
    const Nap nap = DriveWhileHot(done, &driver, deadline);
    LookIfStuck(&watch);
    if (!nap.needed) continue;
    // The ticket is older than this look, so a completion in between ends the sleep at once.
    if (handle != nullptr) handle->BeginWait();
    if (!done()) transport_.WaitUntil(nap.ticket, std::min(nap.until, deadline));
    if (handle != nullptr) handle->EndWait();
  }
  StopDriving(&driver);
}

// Runs rounds while they move anything, and for the hot time after. `driver` is null for the
// background thread. Without a nap: look at done() again.
template <typename Done>
Engine::Nap Engine::DriveWhileHot(const Done& done, const void* driver, TimePoint deadline) {
  std::uint64_t ticket = transport_.ArmDoorbell();
  if (!TakeToken(done, driver != nullptr)) {
    return {!done(), ticket, Now() + options_.max_sleep_outstanding};
  }
  const Duration hot_time = driver != nullptr ? options_.hot_time_waiting : options_.hot_time;
  Nap nap;
  bool last_look = false;  // nothing has moved for the hot time, and the doorbell is armed
  while (!done()) {
    const TimePoint now = Now();
    if (now >= deadline) break;
    if (GuardedRound(now, /*waited_for=*/driver != nullptr)) {
      last_look = false;
    } else if (cooling_.Hot(now, hot_time)) {
      Relax(options_.spin && cooling_.Hot(now, kSpinTime));
    } else if (last_look) {
      nap = NapBeforeSleep(ticket, driver);
      break;
    } else {
      last_look = true;
      ticket = transport_.ArmDoorbell();
    }
  }
  if (!nap.needed) {  // how it is left to others
    outstanding_ = Outstanding();
    next_wake_ = Count(NextWakeUnderToken(Now()));
  }
  token_.Unlock();
  return nap;
}

// Memory may be short, or a callback may throw: then the group fails, and neither the token nor what
// the round had taken out of the queue is lost with it.
bool Engine::GuardedRound(TimePoint now, bool waited_for) {
  try {
    return Round(now, waited_for);
  } catch (const std::exception& error) {
    PostFault(StatusCode::kBackend, std::string("the engine failed: ") + error.what(), {});
    FailInHand(fault());
    return false;
  }
}

// A driver is patient for the hot time: the background thread lets go as soon as it sees a driver,
// and a sleep and a wake cost more.
template <typename Done>
bool Engine::TakeToken(const Done& done, bool patient) {
  if (TryToken()) return true;
  const TimePoint limit = Now() + options_.hot_time;
  while (patient && !pauses_.here() && !done() && Now() < limit) {
    Relax(false);
    if (TryToken()) return true;
  }
  return false;
}

bool Engine::TryToken() {
  if (pauses_.here() || !token_.TryLock()) return false;
  if (!pauses_.here()) return true;
  token_.Unlock();
  return false;
}

Engine::Nap Engine::NapBeforeSleep(std::uint64_t ticket, const void* driver) {
  const TimePoint now = Now();
  const TimePoint wake = NextWakeUnderToken(now);
  outstanding_ = Outstanding();
  next_wake_ = Count(wake);
  if (driver == nullptr) {
    background_until_ = Count(wake);
    return {true, ticket, wake, hold_.has_value()};
  }
  const void* on_duty = duty_;
  if (on_duty == nullptr || on_duty == driver || wake < duty_until_) {
    duty_ = driver;
    duty_until_ = wake;
    return {true, ticket, wake};
  }
  return {true, ticket, now + kOffDutySleep};
}

void Engine::StopDriving(const void* driver) {
  const void* expected = driver;
  const bool had_duty = duty_.compare_exchange_strong(expected, nullptr);
  if (drivers_.fetch_sub(1, std::memory_order_seq_cst) > 1) {
    if (had_duty) transport_.Wake();  // another driver takes the duty
    return;
  }
  const bool work_left = outstanding_ || has_commands_ || queue_.HasNew();
  if (parking_.occupied()) {
    if (work_left || parked_long_) parking_.Unpark();
  } else if (work_left && next_wake_ < background_until_) {
    transport_.Wake();  // it sleeps by an older plan
  }
}

// By threads that do not have the token. Whoever has it may hold it for ever.
void Engine::LookIfStuck(StuckWatch* watch) {
  if (options_.stuck_limit <= Duration::zero() || stuck_) return;
  if (!watch->Look(rounds_, Now()) || stuck_.exchange(true)) return;
  const std::string in = options_.stuck_in ? options_.stuck_in() : "";
  PostFailure({StatusCode::kBackend,
               "this rank's engine has been stuck in one call for " +
                   DurationText(options_.stuck_limit) + (in.empty() ? "" : " (" + in + ")") +
                   ": MPI may block so when a peer on another host dies, and a program must not " +
                   "wait while it has an MpiGate"},
              {});
  const Status why = fault();
  SIRTAKI_LOG(kError, why.ToString());
  trace_.Failed(why, Now());
  if (options_.on_stuck) options_.on_stuck();
  executor_.Abandon(why);  // what it runs may be stuck as well
  transport_.Wake();
}

bool Engine::Outstanding() const {
  if (closed_) return false;
  if (faulted_) return !fault_told_;
  return negotiator_.Outstanding() || !executor_.Idle() || executor_.NeedsStepping() ||
         queue_.pending() > 0;
}

TimePoint Engine::NextWake(TimePoint now) const {
  MutexLock lock(token_);
  return NextWakeUnderToken(now);
}

TimePoint Engine::NextWakeUnderToken(TimePoint now) const {
  TimePoint wake = now + kLongestSleep;
  if (closed_) return wake;
  wake = std::min(wake, negotiator_.NextDeadline());
  if (!timed_calls_.empty()) wake = std::min(wake, timed_calls_.begin()->first);
  wake = std::min(wake, queue_.EarliestDeadline(nullptr));
  if (hold_) wake = std::min(wake, HeldUntil());
  const bool busy = !faulted_ && (!executor_.Idle() || executor_.NeedsStepping());
  if (busy) wake = std::min(wake, now + kRunningInterval);
  if (!transport_.ArrivalsRing() || !flushed_ || (busy && executor_.NeedsPolling())) {
    wake = std::min(wake, cooling_.NextPoll(now, Outstanding()));
  }
  return wake;
}

// Spins only while an answer may be microseconds away: afterwards whoever else wants the core may
// have it.
void Engine::Relax(bool spin) const {
  if (!spin) {
    sched_yield();
    return;
  }
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// ---- the background thread ----

void Engine::StartThread() {
  stop_ = false;
  thread_ = std::thread([this] { RunThread(); });
}

void Engine::StopThread() {
  if (!thread_.joinable()) return;
  if (faulted_ && !fault_told_ && !stuck_) {
    DriveUntil([this] { return fault_told_.load(); }, nullptr, Now() + kTellingTime);
  }
  stop_ = true;
  parking_.Unpark();
  transport_.Wake();
  if (stuck_) {
    thread_.detach();
  } else {
    thread_.join();
  }
  thread_ = {};
}

void Engine::RunThread() {
  pthread_setname_np(pthread_self(), "sirtaki");
  // Short sleeps are meant: by default the kernel lets them run 50 us over.
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  Duration park = kFirstPark;
  std::uint64_t drivers_seen = 0;
  StuckWatch watch(options_.stuck_limit);
  while (!stop_) {
    if (drivers_ > 0) {
      // Longer and longer while the same drivers stay: they need nobody.
      const std::uint64_t changes = driver_changes_;
      park = changes == drivers_seen ? std::min(2 * park, kLongestPark) : kFirstPark;
      drivers_seen = changes;
      parked_long_ = park > kFirstPark;
      Park(Now() + park);
      LookIfStuck(&watch);
      continue;
    }
    const auto done = [this] { return stop_ || drivers_ > 0; };
    const Nap nap = DriveWhileHot(done, nullptr, TimePoint::max());
    if (nap.needed) {
      holding_ = nap.holding;  // from here on more of it need not ring
      transport_.WaitUntil(nap.ticket, nap.until);
      holding_ = false;
      background_until_ = kAwake;
    } else if (drivers_ > 0) {
      transport_.Wake();  // one may have gone to sleep because the token was taken
    }
  }
}

void Engine::Park(TimePoint limit) {
  parking_.Announce();
  if (drivers_ > 0 && !stop_) {
    parking_.Rest(limit);
  } else {
    parking_.Withdraw();
  }
}

void Engine::Ring() { transport_.Wake(); }

// After something new was made visible. A driver that leaves looks at it after it has left, so
// either it or this call sees that nobody drives.
void Engine::WakeSomebody() {
  transport_.Wake();
  if (drivers_.load(std::memory_order_seq_cst) == 0 && parking_.occupied()) parking_.Unpark();
}

}  // namespace sirtaki::core
