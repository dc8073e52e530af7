// An elastic worker is this process as a part of an elastic job: it asks sirtakirun, through the process
// around it, for a place in a generation, and hears at any time that one is over or is to change.
//
// A thread of its own hears that, so that it is answered at once, whatever the program does.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/base/environment.h"
#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/base/types.h"
#include "core/machine/elastic_notice.h"

namespace sirtaki::session {

class Session;

// Thread-safe.
class ElasticWorker {
 public:
  // Says whether sirtakirun has started this process for an elastic job.
  static bool IsOne(const core::EnvironmentView& env);
  static ElasticWorker& OfProcess();  // lives to its end

  struct Place {
    int generation = 0;
    int rank = 0;
    int size = 1;
    std::string address;  // of rank 0
    int port = 0;         // 0: this is rank 0, which chooses it and tells it
    int slot = 0;         // of its host
  };

  // Leaves the generation that this process was in, and waits for a place in another one. It may take as
  // long as sirtakirun waits for others (--elastic-timeout), which ends the job then. Errors: kBackend,
  // kShutDown: the process around this one is not there; kInvalidArgument: another process of its has the
  // place.
  core::Status Ask(const core::EnvironmentView& env, Place* place) SIRTAKI_EXCLUDES(mutex_);
  // Rank 0 of the generation listens there.
  void TellListens(int port) SIRTAKI_EXCLUDES(mutex_);
  // The generation has begun with this session. One that is over already is aborted.
  void Enter(const std::shared_ptr<Session>& session) SIRTAKI_EXCLUDES(mutex_);
  // This process has the state that all train from, which is that of rank `root`, and may give it to
  // others.
  void TellHasState(int root) SIRTAKI_EXCLUDES(mutex_);
  // Nobody can train from what the generation has: sirtakirun is to end the job for this reason, or to
  // drop the `rank` that is alone in that; -1: none is.
  void TellCannotGoOn(const std::string& why, int rank) SIRTAKI_EXCLUDES(mutex_);
  // The generation did not begin here. `why` may name a rank, which is told to sirtakirun.
  void NoteFailedStart(const core::Status& why) SIRTAKI_EXCLUDES(mutex_);

  // Why the generation is over; empty: it goes on.
  std::string WhyOver() const SIRTAKI_EXCLUDES(mutex_);
  // Why the ranks are to leave the generation between two steps; empty: they are not.
  std::string WhyChange() const SIRTAKI_EXCLUDES(mutex_);
  // The ranks that are to get no place in the next generation, as far as is known.
  std::vector<int> LeavingRanks() const SIRTAKI_EXCLUDES(mutex_);
  int generation() const SIRTAKI_EXCLUDES(mutex_);  // 0: none yet

  // The program's training begins. False: it has begun before.
  bool BeginTraining() SIRTAKI_EXCLUDES(mutex_);
  bool has_begun() const SIRTAKI_EXCLUDES(mutex_);

 private:
  core::Status Open(const core::EnvironmentView& env) SIRTAKI_REQUIRES(mutex_);
  core::Status Tell(const core::ElasticNotice& notice) const SIRTAKI_REQUIRES(mutex_);
  void Listen() SIRTAKI_EXCLUDES(mutex_);
  void Hear(const core::ElasticNotice& notice) SIRTAKI_EXCLUDES(mutex_);
  core::Status WhyLeft() const SIRTAKI_REQUIRES(mutex_);  // the generation
  int LostRank() const SIRTAKI_REQUIRES(mutex_);          // -1: none is known
  bool is_over() const SIRTAKI_REQUIRES(mutex_) {
    return place_.generation > 0 && over_ == place_.generation;
  }

  mutable core::Mutex mutex_;
  core::CondVar changed_;
  int fd_ SIRTAKI_GUARDED_BY(mutex_) = -1;  // notices come and go here
  std::string to_ SIRTAKI_GUARDED_BY(mutex_);
  Place place_ SIRTAKI_GUARDED_BY(mutex_);
  bool is_asking_ SIRTAKI_GUARDED_BY(mutex_) = false;
  bool has_begun_ SIRTAKI_GUARDED_BY(mutex_) = false;  // the training
  int over_ SIRTAKI_GUARDED_BY(mutex_) = 0;            // the last generation that is
  std::string why_over_ SIRTAKI_GUARDED_BY(mutex_);
  int to_change_ SIRTAKI_GUARDED_BY(mutex_) = 0;  // the last generation that is
  std::string why_change_ SIRTAKI_GUARDED_BY(mutex_);
  core::RankRanges leaving_ SIRTAKI_GUARDED_BY(mutex_);
  std::shared_ptr<Session> session_ SIRTAKI_GUARDED_BY(mutex_);  // of the generation
  std::string refused_ SIRTAKI_GUARDED_BY(mutex_);               // why this process gets no place
  core::Status failed_start_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::session
