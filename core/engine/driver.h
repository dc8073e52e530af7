// A driver makes an engine's rounds, and decides which threads sleep meanwhile. docs/architecture.md,
// "Threads", has the rules.
//
// - A driver is a thread that waits for something. It drives hot while something moves; then it
//   sleeps on the doorbell until the next timer or poll. Of several drivers one has the duty to
//   come back in time.
// - The background thread parks while there are drivers, away from the doorbell; it is called back
//   by the last driver if work is left, or comes back by itself. Otherwise it does as a driver
//   does.
// - A thread that stops driving makes sure that somebody else knows when to wake.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>

#include "core/base/thread_annotations.h"
#include "core/base/types.h"
#include "core/protocol/transport.h"
#include "core/threads/cooling.h"
#include "core/threads/parking.h"
#include "core/threads/stuck_watch.h"

namespace sirtaki::core {

class HandleState;

struct DriverOptions {
  bool spin = true;  // hot polling spins; false: yields (ranks outnumber cores)
  // A round that lasts this long is stuck in the transport, and this rank's part of the group fails:
  // MPI may block for ever when a peer dies. Zero: never.
  Duration stuck_limit = std::chrono::seconds(30);
  std::function<TimePoint()> now = [] { return Clock::now(); };
};

// Rounds are what a driver drives: an engine, or a test's.
class Rounds {
 public:
  virtual ~Rounds() = default;

  // ---- by the token's holder ----
  // Makes one round; true if anything moved. Does not throw. `waited_for`: a thread waits, so that
  // nothing is held back.
  virtual bool Round(TimePoint now, bool waited_for) = 0;
  // A plan says when the next round is due, if nothing rings before.
  struct Plan {
    TimePoint wake = TimePoint::max();
    bool polls = false;        // the medium does not ring: ask it at intervals until then
    bool outstanding = false;  // work is left for whoever drives
    bool holds = false;        // new work waits for more, until `wake`
  };
  virtual Plan NextRound(TimePoint now) const = 0;

  // ---- by any thread ----
  // True while no round is to be made.
  virtual bool Paused() const = 0;
  // True if something was asked for that no round has taken.
  virtual bool HasNew() const = 0;
  // Called once, when a round has lasted for the stuck limit. The token may be held for ever. Returns
  // the fault, for the log.
  virtual Status OnStuck() = 0;
};

// A driver synchronizes by these. Tests have primitives that a scheduler interleaves.
struct ThreadSync {
  template <typename T>
  using Atomic = std::atomic<T>;
  using Mutex = core::Mutex;
  using Parking = core::Parking;
};

template <typename Sync>
class BasicDriver {
 public:
  // References must outlive the driver. `token`: its holder alone makes rounds; nobody sleeps with
  // it.
  BasicDriver(DriverOptions options, typename Sync::Mutex& token, Bell& bell, Rounds& rounds);
  BasicDriver(const BasicDriver&) = delete;
  BasicDriver& operator=(const BasicDriver&) = delete;

  // ---- by any thread ----

  // Drives or sleeps until `done` or the deadline. `handle`: the one that `done` asks about, whose
  // end then rings; null: none.
  void DriveUntil(const std::function<bool()>& done, HandleState* handle, TimePoint deadline)
      SIRTAKI_EXCLUDES(token_);
  // Something was asked for: wakes a thread that drives or will.
  void WakeSomebody();
  // The background thread sleeps, and comes back by itself for the new work that it holds back.
  bool ComesBackForNewWork() const { return holding_ && drivers_ == 0; }
  // Runs `call`, which does not throw, while no round is made. One that does not return counts as a
  // stuck round.
  void WhileNobodyDrives(const std::function<void()>& call) SIRTAKI_EXCLUDES(token_);

  bool stuck() const { return stuck_; }
  // A thread that waits for the token's holder calls this now and then.
  void LookIfStuck(StuckWatch* watch);

  // ---- by the token's holder ----
  bool MakeRound(TimePoint now, bool waited_for) SIRTAKI_REQUIRES(token_);
  TimePoint NextWake(TimePoint now, const Rounds::Plan& plan) const SIRTAKI_REQUIRES(token_);

  // ---- the background thread ----
  void StartThread();
  // Joins the thread, or finds it stuck() and leaves it behind: then what the driver refers to must
  // stay for the life of the process. Idempotent.
  void StopThread();
  bool has_thread() const { return thread_.joinable(); }
  void RunThread() SIRTAKI_EXCLUDES(token_);

 private:
  struct Nap {
    bool needed = false;
    std::uint64_t ticket = 0;
    TimePoint until{};
    bool holding = false;
    bool on_duty = true;
  };

  // Counts as one call of the token's holder for as long as it lives.
  class CallMark;

  Nap DriveWhileHot(const std::function<bool()>& done, const void* driver, TimePoint deadline)
      SIRTAKI_EXCLUDES(token_);
  bool TakeToken(const std::function<bool()>& done, bool patient) SIRTAKI_TRY_ACQUIRE(true, token_);
  bool FoundTaken(const std::function<bool()>& done, const void* driver, const Nap& nap) const;
  void SayUntil(const void* driver, TimePoint until);
  bool TryToken() SIRTAKI_TRY_ACQUIRE(true, token_);
  Nap NapBeforeSleep(std::uint64_t ticket, const void* driver) SIRTAKI_REQUIRES(token_);
  void BeginDriving();
  bool ReleaseDuty(const void* driver);  // true if the driver had it
  void StopDriving(const void* driver);
  void Park(TimePoint limit);
  void Relax(bool spin) const;
  TimePoint Now() const { return options_.now(); }

  const DriverOptions options_;
  typename Sync::Mutex& token_;
  Bell& bell_;
  Rounds& rounds_;
  Cooling cooling_ SIRTAKI_GUARDED_BY(token_);

  // `duty_` is the driver that sleeps until the next timer or poll, so that the others may sleep until
  // something rings. Null while no driver does.
  typename Sync::template Atomic<int> drivers_{0};
  typename Sync::template Atomic<std::uint64_t> driver_changes_{0};
  typename Sync::template Atomic<const void*> duty_{nullptr};
  typename Sync::template Atomic<Duration::rep> duty_until_{0};
  // These are the plan, as the last holder of the token left it.
  typename Sync::template Atomic<bool> outstanding_{false};
  typename Sync::template Atomic<Duration::rep> next_wake_{0};
  // The background thread comes back by itself then; the smallest value while it is awake.
  typename Sync::template Atomic<Duration::rep> background_until_;
  typename Sync::template Atomic<bool> holding_{false};
  typename Sync::template Atomic<std::uint64_t> calls_{0};  // begun or ended: odd within one
  typename Sync::template Atomic<bool> found_stuck_{false};
  typename Sync::template Atomic<bool> stuck_{false};  // OnStuck has returned
  typename Sync::Parking parking_;
  typename Sync::template Atomic<bool> parked_long_{false};
  typename Sync::template Atomic<bool> stop_{false};
  typename Sync::template Atomic<bool> ended_{false};  // the thread's part of it
  std::thread thread_;
};

using Driver = BasicDriver<ThreadSync>;
extern template class BasicDriver<ThreadSync>;

}  // namespace sirtaki::core
