// The code of BasicDriver, for core/engine/driver.cc and for the test that interleaves its threads.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "core/base/log.h"
#include "core/engine/driver.h"
#include "core/engine/work.h"

namespace sirtaki::core {

namespace driving {

// Poll without sleeping for this long after traffic: the background thread, and a thread that waits.
// The latter has nothing better to do, and must stay awake for longer than a peer's shortest sleep
// takes (about 90 us): else both sleep in turn for ever, each missing the other's answer.
inline constexpr Duration kHotTime = std::chrono::microseconds(50);
inline constexpr Duration kHotTimeWaiting = std::chrono::microseconds(200);

inline constexpr Cooling::Limits kPolls = {.min = std::chrono::microseconds(20),
                                           .max_outstanding = std::chrono::milliseconds(1),
                                           .max_idle = std::chrono::milliseconds(10)};

// Nobody sleeps longer than this, though nothing needs it: it bounds the harm of a lost wake-up.
inline constexpr Duration kLongestSleep = std::chrono::seconds(1);

// Hot polling spins this long before it yields. That is short, for a peer may wait for this very core
// even where there are enough; a yield that finds nobody costs little.
inline constexpr Duration kSpinTime = std::chrono::microseconds(1);

// A driver without the duty is woken by whatever concerns it, and looks by itself this often.
inline constexpr Duration kOffDutySleep = std::chrono::milliseconds(100);

inline constexpr Duration kFirstPark = std::chrono::milliseconds(5);
inline constexpr Duration kLongestPark = std::chrono::milliseconds(100);

inline constexpr Duration::rep kAwake = TimePoint::min().time_since_epoch().count();

inline Duration::rep Count(TimePoint time) { return time.time_since_epoch().count(); }

}  // namespace driving

template <typename Sync>
class BasicDriver<Sync>::CallMark {
 public:
  // The count is written by the token's holder alone.
  explicit CallMark(typename Sync::template Atomic<std::uint64_t>& calls) : calls_(calls) {
    Count();
  }
  ~CallMark() { Count(); }
  CallMark(const CallMark&) = delete;
  CallMark& operator=(const CallMark&) = delete;

 private:
  void Count() {
    calls_.store(calls_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  typename Sync::template Atomic<std::uint64_t>& calls_;
};

template <typename Sync>
BasicDriver<Sync>::BasicDriver(DriverOptions options, typename Sync::Mutex& token, Bell& bell,
                               Rounds& rounds)
    : options_(std::move(options)),
      token_(token),
      bell_(bell),
      rounds_(rounds),
      cooling_(driving::kPolls, options_.now()),
      background_until_(driving::kAwake) {}

template <typename Sync>
void BasicDriver<Sync>::DriveUntil(const std::function<bool()>& done, HandleState* handle,
                                   TimePoint deadline) {
  const char driver = 0;  // its address is this driver's name
  BeginDriving();
  StuckWatch watch(options_.stuck_limit);
  while (!done() && Now() < deadline) {
    const Nap nap = DriveWhileHot(done, &driver, deadline);
    LookIfStuck(&watch);
    if (!nap.needed) continue;
    // The ticket is older than this look, so a completion in between ends the sleep at once.
    if (handle != nullptr) handle->BeginWait();
    if (!done()) bell_.WaitUntil(nap.ticket, std::min(nap.until, deadline));
    if (handle != nullptr) handle->EndWait();
  }
  StopDriving(&driver);
}

template <typename Sync>
void BasicDriver<Sync>::WhileNobodyDrives(const std::function<void()>& call) {
  // This is a driver, too, so that the background thread parks and looks whether it is stuck.
  const char driver = 0;
  BeginDriving();
  token_.Lock();
  {
    const CallMark mark(calls_);
    call();
  }
  token_.Unlock();
  StopDriving(&driver);
  bell_.Wake();
}

template <typename Sync>
bool BasicDriver<Sync>::MakeRound(TimePoint now, bool waited_for) {
  bool moved = false;
  {
    const CallMark mark(calls_);
    moved = rounds_.Round(now, waited_for);
  }
  if (moved) cooling_.Traffic(now);
  return moved;
}

// Makes rounds while they move anything, and for the hot time after. `driver` is null for the
// background thread. The caller looks at done() again if no nap is needed.
template <typename Sync>
typename BasicDriver<Sync>::Nap BasicDriver<Sync>::DriveWhileHot(const std::function<bool()>& done,
                                                                 const void* driver,
                                                                 TimePoint deadline) {
  ReleaseDuty(driver);
  std::uint64_t ticket = bell_.ArmDoorbell();
  if (!TakeToken(done, driver != nullptr)) {
    const TimePoint until =
        Now() + (rounds_.Paused() ? driving::kOffDutySleep : driving::kPolls.max_outstanding);
    // The thread that has the token either sees that this one sleeps, or has let go of the token.
    SayUntil(driver, until);
    if (!TryToken()) return {!done(), ticket, until};
    ReleaseDuty(driver);
  }
  const Duration hot_time = driver != nullptr ? driving::kHotTimeWaiting : driving::kHotTime;
  Nap nap;
  bool last_look = false;  // nothing has moved for the hot time, and the doorbell is armed
  while (!done()) {
    const TimePoint now = Now();
    if (now >= deadline) break;
    if (MakeRound(now, /*waited_for=*/driver != nullptr)) {
      last_look = false;
    } else if (cooling_.Hot(now, hot_time)) {
      Relax(options_.spin && cooling_.Hot(now, driving::kSpinTime));
    } else if (last_look) {
      nap = NapBeforeSleep(ticket, driver);
      break;
    } else {
      last_look = true;
      ticket = bell_.ArmDoorbell();
    }
  }
  if (!nap.needed) {  // how it is left to others
    const TimePoint now = Now();
    const Rounds::Plan plan = rounds_.NextRound(now);
    outstanding_ = plan.outstanding;
    next_wake_ = driving::Count(NextWake(now, plan));
  }
  token_.Unlock();
  if (nap.needed && FoundTaken(done, driver, nap)) nap.needed = false;
  return nap;
}

// True if another thread may have found the token taken just before this one let go of it to sleep: a
// driver that is new, one with new work, or the one on duty, which comes back too late or is awake.
template <typename Sync>
bool BasicDriver<Sync>::FoundTaken(const std::function<bool()>& done, const void* driver,
                                   const Nap& nap) const {
  if (driver == nullptr) return done();
  return rounds_.HasNew() || (!nap.on_duty && (duty_ == nullptr || next_wake_ < duty_until_));
}

// Says when a thread comes back that has found the token taken. A driver has the duty until then, if
// nobody else has it.
template <typename Sync>
void BasicDriver<Sync>::SayUntil(const void* driver, TimePoint until) {
  if (driver == nullptr) {
    background_until_ = driving::Count(until);
    return;
  }
  const void* nobody = nullptr;
  if (duty_.compare_exchange_strong(nobody, driver)) duty_until_ = driving::Count(until);
}

// A driver is patient for the hot time: the background thread lets go as soon as it sees a driver,
// and a sleep and a wake cost more.
template <typename Sync>
bool BasicDriver<Sync>::TakeToken(const std::function<bool()>& done, bool patient) {
  if (TryToken()) return true;
  const TimePoint limit = Now() + driving::kHotTime;
  while (patient && !rounds_.Paused() && !done() && Now() < limit) {
    Relax(false);
    if (TryToken()) return true;
  }
  return false;
}

template <typename Sync>
bool BasicDriver<Sync>::TryToken() {
  if (rounds_.Paused() || !token_.TryLock()) return false;
  if (!rounds_.Paused()) return true;
  token_.Unlock();
  return false;
}

template <typename Sync>
typename BasicDriver<Sync>::Nap BasicDriver<Sync>::NapBeforeSleep(std::uint64_t ticket,
                                                                  const void* driver) {
  const TimePoint now = Now();
  const Rounds::Plan plan = rounds_.NextRound(now);
  const TimePoint wake = NextWake(now, plan);
  outstanding_ = plan.outstanding;
  next_wake_ = driving::Count(wake);
  if (driver == nullptr) {
    background_until_ = driving::Count(wake);
    return {true, ticket, wake, plan.holds};
  }
  const void* on_duty = duty_;
  if (on_duty == nullptr || on_duty == driver || driving::Count(wake) < duty_until_) {
    duty_ = driver;
    duty_until_ = driving::Count(wake);
    return {true, ticket, wake};
  }
  return {true, ticket, now + driving::kOffDutySleep, /*holding=*/false, /*on_duty=*/false};
}

template <typename Sync>
TimePoint BasicDriver<Sync>::NextWake(TimePoint now, const Rounds::Plan& plan) const {
  TimePoint wake = std::min(now + driving::kLongestSleep, plan.wake);
  if (plan.polls) wake = std::min(wake, cooling_.NextPoll(now, plan.outstanding));
  return wake;
}

template <typename Sync>
void BasicDriver<Sync>::BeginDriving() {
  if (drivers_.fetch_add(1) == 0) driver_changes_.fetch_add(1);
}

template <typename Sync>
bool BasicDriver<Sync>::ReleaseDuty(const void* driver) {
  const void* expected = driver;
  return driver != nullptr && duty_.compare_exchange_strong(expected, nullptr);
}

template <typename Sync>
void BasicDriver<Sync>::StopDriving(const void* driver) {
  const bool had_duty = ReleaseDuty(driver);
  const bool others_drive = drivers_.fetch_sub(1) > 1;
  const bool has_new = rounds_.HasNew();  // this driver's own, if it has made no round
  if (others_drive) {
    // Another driver takes the duty, or learns that something is due before it comes back.
    if (has_new || had_duty || duty_ == nullptr || next_wake_ < duty_until_) bell_.Wake();
  } else if (parking_.occupied()) {
    if (has_new || outstanding_ || parked_long_) parking_.Unpark();
  } else if (has_new || (outstanding_ && next_wake_ < background_until_)) {
    bell_.Wake();  // the background thread sleeps by an older plan
  }
}

// Threads that do not have the token call this. The thread that has it may hold it for ever.
template <typename Sync>
void BasicDriver<Sync>::LookIfStuck(StuckWatch* watch) {
  if (options_.stuck_limit <= Duration::zero() || stuck_) return;
  if (!watch->Look(calls_, Now()) || found_stuck_.exchange(true)) return;
  // A thread that sees stuck_ finds the fault, unless memory was too short for that.
  const auto say = [this](const void*) {
    stuck_ = true;
    bell_.Wake();
  };
  Status why;
  {
    const std::unique_ptr<const void, decltype(say)> at_the_end(this, say);
    why = rounds_.OnStuck();
  }
  // Last: what is stuck may be another line of the log.
  SIRTAKI_LOG(kError, why.ToString());
}

// Spins only while an answer may be microseconds away: afterwards whoever else wants the core may
// have it.
template <typename Sync>
void BasicDriver<Sync>::Relax(bool spin) const {
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

template <typename Sync>
void BasicDriver<Sync>::StartThread() {
  stop_ = false;
  ended_ = false;
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "sirtaki");
    // Short sleeps are meant: by default the kernel lets them run 50 us over.
    prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
    RunThread();
    ended_ = true;
    bell_.Wake();
  });
}

template <typename Sync>
void BasicDriver<Sync>::StopThread() {
  stop_ = true;
  parking_.Unpark();
  bell_.Wake();
  if (!thread_.joinable()) return;
  StuckWatch watch(options_.stuck_limit);  // nobody else looks any more
  while (!ended_ && !stuck_) {
    const std::uint64_t ticket = bell_.ArmDoorbell();
    if (!ended_ && !stuck_) bell_.WaitUntil(ticket, Now() + driving::kOffDutySleep);
    LookIfStuck(&watch);
  }
  if (stuck_) {
    thread_.detach();
  } else {
    thread_.join();
  }
  thread_ = {};
}

template <typename Sync>
void BasicDriver<Sync>::RunThread() {
  Duration park = driving::kFirstPark;
  std::uint64_t drivers_seen = 0;
  StuckWatch watch(options_.stuck_limit);
  while (!stop_) {
    if (drivers_ > 0) {
      // It parks longer and longer while the same drivers stay: they need nobody.
      const std::uint64_t changes = driver_changes_;
      park =
          changes == drivers_seen ? std::min(2 * park, driving::kLongestPark) : driving::kFirstPark;
      drivers_seen = changes;
      parked_long_ = park > driving::kFirstPark;
      Park(Now() + park);
      LookIfStuck(&watch);
      continue;
    }
    const Nap nap =
        DriveWhileHot([this] { return stop_ || drivers_ > 0; }, nullptr, TimePoint::max());
    if (nap.needed) {
      holding_ = nap.holding;  // from here on more of it need not ring
      bell_.WaitUntil(nap.ticket, nap.until);
      holding_ = false;
    } else if (drivers_ > 0) {
      bell_.Wake();  // one may have gone to sleep because the token was taken
    }
    background_until_ = driving::kAwake;
  }
}

template <typename Sync>
void BasicDriver<Sync>::Park(TimePoint limit) {
  parking_.Announce();
  parking_.Rest(drivers_ > 0 && !stop_ ? limit : TimePoint());
}

// The caller has made something new visible. A driver that leaves looks at it after it has left, so
// either it or this call sees that nobody drives.
template <typename Sync>
void BasicDriver<Sync>::WakeSomebody() {
  bell_.Wake();
  if (drivers_ == 0 && parking_.occupied()) parking_.Unpark();
}

}  // namespace sirtaki::core
