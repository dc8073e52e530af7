// The news of an elastic job go to standard error as they come, and into its history.
#pragma once

#include <string>
#include <vector>

#include "core/base/environment.h"
#include "core/base/types.h"
#include "launch/base/rank_messages.h"
#include "launch/elastic/history.h"
#include "launch/elastic/membership.h"
#include "launch/job/job_output.h"
#include "launch/options/options.h"
#include "launch/reports/generations.h"

namespace sirtaki::launch {

// One thread uses it.
class JobNews {
 public:
  JobNews(const LaunchOptions& options, const core::EnvironmentView& env, JobOutput* output)
      : output_(*output), history_(options, env) {}

  // Say prints a line of sirtakirun's, as soon as standard error has room for it.
  void Say(const std::string& text) const { output_.Tell(text); }

  // The course of a generation: it is decided, all have joined it, all have its state, a member leaves
  // it because it has failed, it is over.
  void TellDecided(int generation, const std::vector<Generation::Member>& members,
                   core::TimePoint now);
  void TellJoined(int generation, core::TimePoint now);
  void TellTrains(int generation, WorkerId with_state_of, core::TimePoint now);
  void NoteFailure(core::TimePoint now);
  void TellOver(int generation, const std::string& why, core::TimePoint now);
  // NoteOver and NoteEnd write into the history what has its line elsewhere: a generation is over, the
  // job ends (`why`: empty if all is well).
  void NoteOver(int generation, const std::string& why, core::TimePoint at);
  void NoteEnd(int generation, const std::string& why, core::TimePoint at);

  // A worker is gone in the time of the generation that was told last.
  void TellLeft(const Generation::Member& worker, const std::string& how, core::TimePoint now);

  // The text says what its program has thrown or raised, if its last words tell. `code`: what a job ends
  // with by it.
  std::string HowItEnded(const Generation::Member& worker, const EndMessage& end, int* code) const;

  // Nothing waits in silence: a line tells for what, and again when that changes, and each minute. Hosts
  // that are left out for good in a job that trains are told once.
  void TellWaits(const Membership::Wait& wait, const std::vector<Membership::LeftOut>& hosts,
                 core::TimePoint now);
  core::TimePoint NextTime() const { return tell_wait_at_; }  // max: nothing waits

 private:
  JobOutput& output_;
  History history_;
  int decided_ = 0;  // the generation that was told last
  core::TimePoint decided_at_{};
  core::TimePoint joined_at_{};
  core::TimePoint over_at_ = core::TimePoint::max();  // the generation before; max: it goes on
  int told_over_ = 0;                                 // the generation that was told to be over
  std::string waits_for_;                             // at the last turn
  core::TimePoint tell_wait_at_ = core::TimePoint::max();
};

}  // namespace sirtaki::launch
