// A course is the way of a run from its start to its end: the phase that it is in, and what time alone brings. Pure: time is
// an argument.
//
//   phase         its time                              what is due when it is over    the next phase
//   kStarting     the start timeout                     kLateStart: the run fails      kFailing, at once over
//   kRunning      the start timeout, once all ranks     kLateInit: the run fails       kFailing, at once over
//                 wait in MPI_Init
//   kFailing      2 s, in which the launcher may end    kStop: all ranks are told      kStopping
//                 the ranks; none after a signal
//   kStopping     4 s, in which the ranks kill their    kTerminate: the launcher is    kTerminating
//                 programs; none where none is there    told to end
//   kTerminating  3 s                                   kKill: it is killed            kKilled
//   kKilled       no end: only what was printed is still written
//
// Arrive leads from kStarting to kRunning, Fail from both to kFailing, and a signal that comes again to kKilled.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "core/base/types.h"

namespace sirtaki::launch {

// Two signals within this time are one: a terminal that closes may send two.
inline constexpr core::Duration kAskedOnce = std::chrono::seconds(1);

enum class Phase : std::uint8_t { kStarting, kRunning, kFailing, kStopping, kTerminating, kKilled };

enum class Due : std::uint8_t { kNothing, kLateStart, kLateInit, kStop, kTerminate, kKill };

// One thread uses it.
class Course {
 public:
  Course(int ranks, core::TimePoint now, core::Duration start_timeout)
      : ranks_(ranks), start_timeout_(start_timeout), until_(now + start_timeout) {}

  Phase phase() const { return phase_; }
  bool begun() const { return begun_; }  // the programs of the ranks
  bool stopped() const { return phase_ >= Phase::kStopping; }
  bool told_launcher() const { return phase_ >= Phase::kTerminating; }  // to end
  bool signalled() const { return signalled_at_.has_value(); }

  // A rank has come. True: all have, and their programs are to begin.
  bool Arrive();
  // Some ranks have gone into MPI_Init or come out of it. Once all are in it, or have ended, none of them waits for a program
  // that has not come so far.
  void NoteInit(bool all_in, bool all_through, core::TimePoint now);
  // The run has failed. The launcher has that long to end the ranks, or less if it had less before.
  void Fail(core::TimePoint now, core::Duration grace = std::chrono::seconds(2));
  // A signal asks for the end. True: it asks again, or nothing but output is left, and the launcher is to be killed.
  bool TakeSignal(core::TimePoint now);
  // The launcher has ended; ranks may say their last words. `for_hosts`: until a silent host is noticed.
  void NoteLauncherEnd(bool for_hosts, core::TimePoint now);

  // TakeDue returns what is due now that the time of the phase is over, and the next phase has begun then.
  Due TakeDue(core::TimePoint now);
  core::TimePoint NextTime() const;  // max: none
  // Ranks may still say something after the launcher's end.
  bool hears_ranks() const { return phase_ != Phase::kKilled && leave_at_ != kNever; }

 private:
  static constexpr core::TimePoint kNever = core::TimePoint::max();

  const int ranks_;
  const core::Duration start_timeout_;
  int arrived_ = 0;
  Phase phase_ = Phase::kStarting;
  bool begun_ = false;
  core::TimePoint until_;  // the end of the phase
  core::TimePoint leave_at_ = kNever;
  std::optional<core::TimePoint> signalled_at_;  // first
};

}  // namespace sirtaki::launch
