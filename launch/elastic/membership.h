// The membership says who takes part in an elastic job. Workers come and go; those that train together
// are a generation, a job of its own with ranks from 0. Pure: events and time in, orders out.
//
// A worker is a process of the user's program. It has a number that no other one of the job has had,
// and is in one of these states:
//   kStarting  its host was told to start it
//   kReady     its program asks for a generation
//   kMember    it has a place in the generation
//   kEnding    it was told to end, or its host has lost it, and it may still run
//
// A generation is over when a member ends, asks for another one, or is evicted. The next one begins
// when every member that is left has asked for it: until then a member may still be in the memory that
// it shares with the others. What happens meanwhile, and until all members have joined, is for the
// generation behind it.
//
// What has been trained lies in the members alone: one of them stays as long as there is one.
#pragma once

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/types.h"
#include "launch/elastic/orders.h"

namespace sirtaki::launch {

struct ElasticLimits {
  int min_ranks = 1;
  int max_ranks = 1;
  // How many generations may follow the first one; none: any number.
  std::optional<int> resets;
  // How long the job waits for as many workers as it needs, and for one that does not ask.
  core::Duration timeout = std::chrono::seconds(600);
  // How long a member may take to answer that it has heard of its generation's end; if others have
  // lost it already, the shorter time.
  core::Duration answer_time = std::chrono::seconds(5);
  core::Duration suspect_time = std::chrono::milliseconds(600);
  // How long a generation may take until all its members have joined; longer than start_timeout.
  core::Duration join_timeout = std::chrono::seconds(60);
  // A worker whose host has lost it has ended itself after this time. A program that has ended waits no
  // longer for one that was killed.
  core::Duration orphan_time = std::chrono::seconds(20);
  // How long nothing is started on a host where workers have failed: the least for the first time,
  // twice as long for each one that follows it soon, at most the most. What fails before that is over
  // belongs to the same time.
  core::Duration cooldown_least = std::chrono::seconds(1);
  core::Duration cooldown_most = std::chrono::seconds(300);
};

struct HostSlots {
  std::string host;
  int slots = 1;
  bool operator==(const HostSlots&) const = default;
};

// How a worker has ended.
enum class WorkerEnd : std::uint8_t {
  kFinished,  // its program, with exit code 0
  kFailed,    // its program, otherwise, or it could not be started
  kLost,      // its host answers no more: it may still run
};

// One thread uses it.
class Membership {
 public:
  explicit Membership(ElasticLimits limits) : limits_(std::move(limits)) {}

  // ---- events ----

  // These hosts are there from now on, and no others. A member on a host that is gone from the list
  // stays until the next generation.
  void TakeHosts(std::vector<HostSlots> hosts, core::TimePoint now);
  // The worker asks for a generation. `left`: the one that it was in; 0: none yet. `suspects`: members
  // of that one, which it has lost or waited for in vain. `has_failed`: it does not ask for the change
  // that was announced.
  void NoteReady(WorkerId worker, int left, const std::vector<WorkerId>& suspects,
                 core::TimePoint now, bool has_failed = false);
  // The member is in the generation with all others.
  void NoteJoined(WorkerId worker, int generation);
  // The member knows that the generation is over, or that a change was announced, and asks as soon as it
  // can.
  enum class Heard : std::uint8_t { kOver, kChange };
  void NoteHeard(WorkerId worker, int generation, Heard what);
  // The member is stopped, and cannot hear that the generation is over.
  void NoteStopped(WorkerId worker, int generation);
  // The worker has the state that others may take from it.
  void NoteState(WorkerId worker);
  // The member has found that nobody can train from what the generation has, and that a later one could
  // not: the job ends. New workers would train from nothing, and nobody would notice. If that is because
  // of one worker, which has no state, while others have it, that one is dropped, and they go on.
  void NoteCannotGoOn(WorkerId worker, int generation, const std::string& why,
                      std::optional<WorkerId> because_of, core::TimePoint now);
  // `code`: what the job ends with if this was the first failure, and nobody is left.
  void NoteEnd(WorkerId worker, WorkerEnd how, const std::string& why, core::TimePoint now,
               int code = 1);

  // The orders that follow, in the order in which they are to be carried out.
  std::vector<ElasticOrder> TakeOrders(core::TimePoint now);
  // The next time at which there may be an order without an event, after orders were taken; max: never.
  core::TimePoint NextTime() const;

  // What the job waits for; an empty text: nothing, its ranks train. `until`: it waits no longer; max:
  // for as long as that takes.
  struct Wait {
    std::string what;
    core::TimePoint until = core::TimePoint::max();
  };
  Wait WaitsFor() const;
  // The hosts on which workers are missing, and none is started until then.
  struct LeftOut {
    std::string host;
    core::TimePoint until;  // max: nobody knows
    std::string why;
  };
  std::vector<LeftOut> HostsLeftOut(core::TimePoint now) const;

  int generation() const { return generation_; }  // 0: none has begun
  std::vector<WorkerId> Members() const;          // of the generation, those that are left

 private:
  enum class State : std::uint8_t { kStarting, kReady, kMember, kEnding };
  struct Worker {
    std::string host;
    int slot = 0;
    State state = State::kStarting;
    bool has_state = false;   // of what was trained
    bool has_joined = false;  // any generation
    int member_of = 0;        // the last generation that it had a place in; 0: none yet
    bool joined = false;      // that one
    bool heard = false;       // that it is over; before, that a change was announced
    bool leaves = false;      // the change that was announced names it
    bool stopped = false;     // when it was to hear that it is over
    core::TimePoint since{};  // it was started; then, it has asked; then, it was told to end
    core::TimePoint first_begun = kNever;  // its first generation
    core::TimePoint suspected_at = kNever;
    core::TimePoint ends_by = kNever;  // by itself
  };
  struct Host {
    int slots = 0;  // 0: it is listed no more
    int failures = 0;
    core::TimePoint not_before = core::TimePoint::min();
  };
  struct Suspicion {
    WorkerId of = 0;  // who has asked for another generation
    WorkerId against = 0;
    auto operator<=>(const Suspicion&) const = default;
  };
  using Pair = std::pair<WorkerId, WorkerId>;  // the lower first

  static constexpr core::TimePoint kNever = core::TimePoint::max();

  bool IsListed(const Worker& worker) const { return worker.slot < hosts_.at(worker.host).slots; }
  bool IsOver() const { return over_at_ != kNever; }
  bool IsToChange() const { return announced_at_ != kNever; }
  // It was in the generation that is over, and has asked for another one.
  bool IsSurvivor(const Worker& worker) const;
  // A survivor whose place is listed no more keeps it for one generation if no change has told the
  // others that it leaves: it may have a copy of a shard that only one that was lost had besides.
  bool Stays(const Worker& survivor) const {
    return IsListed(survivor) || (IsOver() && !survivor.leaves);
  }
  // It was told to end, and its host has not told of its end, which may never come.
  static bool IsKilled(const Worker& worker);
  bool HasKilled(const std::string& host) const;
  bool HasAny(State state) const;
  std::ptrdiff_t Alive() const;  // workers whose places are listed
  // Those that have trained longest come first.
  static auto AgeOf(const Worker& worker) {
    return std::pair(!worker.has_state, worker.first_begun);
  }
  std::vector<int> FreeSlots(const std::string& name, const Host& host) const;
  std::vector<WorkerId> Candidates() const;
  void SettleSlots(const std::vector<WorkerId>& chosen);
  // The time at which the job ends if too few have come. Precondition: the generation is over.
  core::TimePoint LateAt() const;
  bool MustWait(const std::vector<WorkerId>& chosen, bool is_late) const;
  bool LeaveHostsThatHang(const std::vector<WorkerId>& chosen, bool is_late, core::TimePoint now);
  void GoOver(const std::string& why, core::TimePoint now);
  // Those that were to leave may have the only copies of what `lost` had of them, or of its own.
  void KeepThoseThatLeave(const Worker& lost);
  void TellOver(const std::string& why, core::TimePoint now);
  void EndIfNobodyIsLeft();
  void Blame(const Worker& worker, core::TimePoint now);
  void Evict(WorkerId id, const std::string& why, core::TimePoint now);
  void Drop(WorkerId id, const std::string& why, core::TimePoint now);
  core::TimePoint MustAnswerBy(const Worker& worker) const;
  void EvictSilent(core::TimePoint now);
  void EvictNotJoined(core::TimePoint now);
  void ForgetOrphans(core::TimePoint now);
  bool EvictOneOfAQuarrel(core::TimePoint now);
  void ForgetFailedBegins();
  bool DropUnreached(core::TimePoint now);
  bool DropThoseThatNeverJoin(core::TimePoint now);
  bool GoDownToTheLeast(const std::vector<WorkerId>& chosen, core::TimePoint now);
  void Finish(core::TimePoint now);
  void Start(core::TimePoint now);
  void Begin(core::TimePoint now);
  void Announce(core::TimePoint now);
  void End(int code, std::string why);
  void EndForGood(const std::string& what);  // with the first failure's code
  std::string NamesOf(const std::vector<WorkerId>& workers) const;
  std::string WaitsForRoom() const;

  const ElasticLimits limits_;
  std::map<WorkerId, Worker> workers_;
  std::map<std::string, Host> hosts_;
  std::vector<std::string> host_order_;  // as they are listed
  WorkerId next_worker_ = 0;
  int first_workers_ = 0;      // those that were started first
  int failed_starts_ = 0;      // until one has asked
  bool is_last_hope_ = false;  // those that are starting; nobody else is started
  bool has_one_asked_ = false;
  int generation_ = 0;
  core::TimePoint announced_at_ = kNever;  // a change of the generation
  core::TimePoint begun_at_ = kNever;      // the generation; kNever: all have had their time
  core::TimePoint over_at_ = kNever;       // kNever: the generation goes on
  core::TimePoint told_at_ = kNever;       // the members, that it is over
  std::set<Suspicion> suspicions_;         // since then
  bool weighed_ = false;                   // they were
  bool has_had_state_ = false;             // a worker; then it is not given up
  int failed_begins_ = 0;  // generations in a row that did not come together, and nobody had ended
  core::TimePoint failed_since_ = kNever;  // the first of them
  bool are_apart_ = false;                 // workers were dropped for it since then
  int least_from_ = 0;                     // since this generation only the fewest try; 0: all do
  std::map<Pair, int> quarrels_;           // in so many generations in a row
  std::string last_end_;                   // why a worker has ended
  // How the first that failed of the generation has ended, and its program's exit code; none: nobody.
  std::optional<std::pair<std::string, int>> first_failure_;
  std::optional<std::string>
      finished_;                // a program has ended well; else what went wrong afterwards
  std::string finished_first_;  // the worker whose program that was
  bool ended_ = false;
  core::TimePoint now_ = core::TimePoint::min();  // orders were taken
  std::vector<ElasticOrder> orders_;
};

}  // namespace sirtaki::launch
