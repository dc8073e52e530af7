#include "launch/elastic/membership.h"

#include <algorithm>

#include "core/base/text.h"
#include "core/base/words.h"
#include "core/machine/elastic_notice.h"
#include "launch/elastic/membership_texts.h"

namespace sirtaki::launch {

using core::Duration;
using core::TimePoint;

namespace {

// Workers that come soon after each other come by one change.
constexpr auto kGatherTime = std::chrono::milliseconds(300);

}  // namespace

bool Membership::IsSurvivor(const Worker& worker) const {
  return worker.state == State::kReady && generation_ > 0 && worker.member_of == generation_;
}

bool Membership::IsKilled(const Worker& worker) {
  return worker.state == State::kEnding && worker.ends_by == kNever;
}

bool Membership::HasKilled(const std::string& host) const {
  return std::ranges::any_of(workers_, [&host](const auto& one) {
    return one.second.host == host && IsKilled(one.second);
  });
}

bool Membership::HasAny(State state) const {
  return std::ranges::any_of(workers_,
                             [state](const auto& one) { return one.second.state == state; });
}

std::ptrdiff_t Membership::Alive() const {
  return std::ranges::count_if(workers_, [this](const auto& one) {
    return one.second.state != State::kEnding && IsListed(one.second);
  });
}

std::vector<WorkerId> Membership::Members() const {
  std::vector<WorkerId> members;
  for (const auto& [id, worker] : workers_) {
    if (worker.state == State::kMember) members.push_back(id);
  }
  return members;
}

// ---- events ----

void Membership::TakeHosts(std::vector<HostSlots> hosts, TimePoint now) {
  for (auto& [name, host] : hosts_) host.slots = 0;
  host_order_.clear();
  for (HostSlots& one : hosts) {
    Host& host = hosts_[one.host];
    if (host.slots == 0) host_order_.push_back(one.host);
    host.slots += one.slots;
  }
  if (ended_) return;
  if (generation_ == 0 && !IsOver()) over_at_ = told_at_ = now;
  for (const auto& [id, worker] : workers_) {
    if (IsListed(worker) || worker.state == State::kMember || IsSurvivor(worker)) continue;
    Evict(id, "its place is listed no more", now);
  }
}

void Membership::NoteReady(WorkerId worker, int left, const std::vector<WorkerId>& suspects,
                           TimePoint now, bool has_failed) {
  const auto found = workers_.find(worker);
  if (found == workers_.end() || found->second.state == State::kEnding) return;
  Worker& asking = found->second;
  if (left != asking.member_of) return;  // it was told of a newer one meanwhile
  has_one_asked_ = true;
  is_last_hope_ = false;
  const bool was_member = asking.state == State::kMember;
  if (asking.state != State::kReady) asking.since = now;
  asking.state = State::kReady;
  if (finished_) return;
  for (const WorkerId id : suspects) {
    const auto other = workers_.find(id);
    if (id == worker || other == workers_.end() || other->second.member_of != left) continue;
    suspicions_.insert({worker, id});
    other->second.suspected_at = std::min(other->second.suspected_at, now);
    if (other->second.host == asking.host) continue;
    // The host may be gone, and the others there with it; one that is there answers at once.
    for (auto& [mate, there] : workers_) {
      const bool is_mate = there.host == other->second.host && there.member_of == left;
      if (is_mate) there.suspected_at = std::min(there.suspected_at, now);
    }
  }
  if (!was_member) return;
  const std::string why = NameOf(worker, asking.host) + " has asked for another group";
  if (!IsToChange() || has_failed || !suspects.empty()) return GoOver(why, now);
  // The others are about to, and are not to be disturbed in the step that they share with it.
  if (!IsOver()) over_at_ = now;
}

void Membership::NoteJoined(WorkerId worker, int generation) {
  const auto found = workers_.find(worker);
  if (found == workers_.end() || generation != generation_) return;
  if (found->second.state != State::kMember) return;
  found->second.joined = found->second.has_joined = true;
  const bool have_all = std::ranges::all_of(workers_, [](const auto& one) {
    return one.second.state != State::kMember || one.second.joined;
  });
  if (have_all && !IsOver()) ForgetFailedBegins();
}

void Membership::NoteState(WorkerId worker) {
  const auto found = workers_.find(worker);
  if (found == workers_.end()) return;
  found->second.has_state = has_had_state_ = true;
}

void Membership::NoteCannotGoOn(WorkerId worker, int generation, const std::string& why,
                                std::optional<WorkerId> because_of, TimePoint now) {
  const auto found = workers_.find(worker);
  if (found == workers_.end() || generation != generation_) return;
  if (found->second.state != State::kMember) return;
  const auto cause = because_of ? workers_.find(*because_of) : workers_.end();
  const bool has_left = cause == workers_.end() || cause->second.state != State::kMember;
  if (because_of && has_left) return;
  const bool others_can = std::ranges::any_of(workers_, [](const auto& one) {
    return one.second.has_state && one.second.state != State::kEnding;
  });
  if (!because_of || cause->second.has_state || !others_can || finished_) {
    return End(1, "the training cannot go on: " + NameOf(worker, found->second.host) + ": " + why);
  }
  Drop(*because_of, "it cannot take the state of the others: " + why, now);
  GoOver(last_end_, now);
}

void Membership::NoteHeard(WorkerId worker, int generation, Heard what) {
  const auto found = workers_.find(worker);
  const bool is_told_of = what == (told_at_ == kNever ? Heard::kChange : Heard::kOver);
  if (found != workers_.end() && generation == generation_ && is_told_of)
    found->second.heard = true;
}

void Membership::NoteStopped(WorkerId worker, int generation) {
  const auto found = workers_.find(worker);
  const bool is_told = generation == generation_ && told_at_ != kNever;
  if (found != workers_.end() && is_told) found->second.stopped = true;
}

void Membership::NoteEnd(WorkerId worker, WorkerEnd how, const std::string& why, TimePoint now,
                         int code) {
  const auto found = workers_.find(worker);
  if (found == workers_.end()) return;
  const Worker was = found->second;
  if (how == WorkerEnd::kLost) {
    found->second.state = State::kEnding;
    found->second.since = now;
    found->second.ends_by = std::min(found->second.ends_by, now + limits_.orphan_time);
  } else {
    workers_.erase(found);
  }
  if (was.state == State::kMember) ForgetFailedBegins();
  if (was.state == State::kEnding) return;
  // One that ends well before it has taken part is of no use where others train, or want to.
  const bool is_alone = generation_ == 0 && !HasAny(State::kReady);
  if (how == WorkerEnd::kFinished && (was.state == State::kMember || is_alone)) {
    if (!finished_) {
      finished_first_ = NameOf(worker, was.host);
      finished_.emplace();
    }
    return;
  }
  last_end_ = NameOf(worker, was.host) + ": " + why;
  if (how == WorkerEnd::kFailed && !first_failure_) first_failure_ = {last_end_, code};
  if (finished_ && finished_->empty()) finished_ = last_end_;
  Blame(was, now);
  KeepThoseThatLeave(was);
  if (was.state == State::kMember) GoOver(last_end_, now);
  if (how != WorkerEnd::kFailed || HasAny(State::kReady) || HasAny(State::kMember)) return;
  // A program that fails wherever it runs would be started for ever.
  const bool is_start = was.state == State::kStarting;
  if (is_start && !has_one_asked_) ++failed_starts_;
  if (!is_start || (!has_one_asked_ && failed_starts_ >= first_workers_)) is_last_hope_ = true;
}

// ---- what follows ----

void Membership::KeepThoseThatLeave(const Worker& lost) {
  if (!IsSurvivor(lost)) return;
  for (auto& [id, worker] : workers_) worker.leaves = false;
}

// The members that are left are told at once.
void Membership::GoOver(const std::string& why, TimePoint now) {
  if (finished_) return;
  if (!IsOver()) over_at_ = now;
  TellOver(why, now);
}

void Membership::TellOver(const std::string& why, TimePoint now) {
  if (told_at_ != kNever) return;
  told_at_ = now;
  const std::vector<WorkerId> left = Members();
  // Those that were to leave may not have given their copies of shards to the others.
  for (auto& [id, worker] : workers_) worker.leaves = false;
  if (left.empty()) return;
  for (const WorkerId id : left) workers_.at(id).heard = workers_.at(id).stopped = false;
  orders_.push_back(EndGeneration{generation_, left, why});
}

// Those that are being started may still come, unless somebody had what was trained.
void Membership::EndIfNobodyIsLeft() {
  if (finished_ || HasAny(State::kReady) || HasAny(State::kMember)) return;
  const bool is_for_good = is_last_hope_ && !HasAny(State::kStarting);
  if (!has_had_state_ && !is_for_good) return;
  EndForGood("all workers have failed");
}

// The host's next workers have to wait, the longer the sooner its workers fail again.
void Membership::Blame(const Worker& worker, TimePoint now) {
  Host& host = hosts_.at(worker.host);
  if (now < host.not_before) return;
  const bool has_lasted =
      worker.first_begun != kNever && now - worker.first_begun > limits_.cooldown_most;
  host.failures = has_lasted ? 1 : host.failures + 1;
  Duration time = limits_.cooldown_least;
  for (int i = 1; i < host.failures && time < limits_.cooldown_most; ++i) time *= 2;
  host.not_before = now + std::min(time, limits_.cooldown_most);
}

void Membership::Evict(WorkerId id, const std::string& why, TimePoint now) {
  Worker& worker = workers_.at(id);
  if (worker.state == State::kEnding) return;
  worker.state = State::kEnding;
  worker.since = now;
  orders_.push_back(EndWorker{id, why});
}

// Evicts it because something is wrong with it.
void Membership::Drop(WorkerId id, const std::string& why, TimePoint now) {
  const Worker& worker = workers_.at(id);
  Blame(worker, now);
  KeepThoseThatLeave(worker);
  last_end_ = NameOf(id, worker.host) + ": " + why;
  if (finished_ && finished_->empty()) finished_ = last_end_;
  Evict(id, why, now);
}

// The time at which a worker that is starting must have asked, and one that is to leave a generation
// must have answered or asked. One that is busy answers at once, and asks later. One that is stopped,
// and that others have missed for the peer time-out, has had its time.
TimePoint Membership::MustAnswerBy(const Worker& worker) const {
  if (worker.state == State::kStarting) return worker.since + limits_.timeout;
  if (worker.state != State::kMember) return kNever;
  if (told_at_ == kNever) {
    return IsToChange() && !worker.heard ? announced_at_ + limits_.answer_time : kNever;
  }
  if (worker.heard) return told_at_ + limits_.timeout;
  if (worker.suspected_at != kNever) {
    return std::max(worker.suspected_at, told_at_) +
           (worker.stopped ? Duration::zero() : limits_.suspect_time);
  }
  return told_at_ + limits_.answer_time;
}

void Membership::EvictSilent(TimePoint now) {
  // Where all have left for the change, it holds: the next generation may wait for one that is ending.
  if (IsOver() && HasAny(State::kMember) && now >= over_at_ + limits_.answer_time) {
    TellOver("a change was announced, and others have left", now);
  }
  for (const auto& [id, worker] : workers_) {
    if (now < MustAnswerBy(worker)) continue;
    const bool is_member = worker.state == State::kMember;
    const std::string in_time =
        " within --elastic-timeout (" + core::DurationText(limits_.timeout) + ")";
    std::string why = "it does not answer: it is stopped, or its host hangs";
    if (worker.stopped) why = "it is stopped";
    if (is_member && worker.heard) {
      why = "its program has not left generation " + std::to_string(generation_) + in_time +
            ": it hangs in its own code, or keeps the error that tells it";
    }
    if (!is_member) why = "its program has not called init()" + in_time;
    Drop(id, why, now);
    if (is_member) GoOver(last_end_, now);
  }
}

// Where nobody has joined it may be because of one: all are asked again, and that one is found.
void Membership::EvictNotJoined(TimePoint now) {
  if (IsOver() || begun_at_ == kNever || now < begun_at_ + limits_.join_timeout) return;
  begun_at_ = kNever;
  const bool has_any = std::ranges::any_of(workers_, [](const auto& one) {
    return one.second.state == State::kMember && one.second.joined;
  });
  for (const auto& [id, worker] : workers_) {
    if (worker.state != State::kMember || worker.joined) continue;
    const std::string why = "it has not come to the others in time";
    if (has_any) Drop(id, why, now);
    GoOver(NameOf(id, worker.host) + ": " + why, now);
  }
}

void Membership::ForgetOrphans(TimePoint now) {
  std::erase_if(workers_, [now](const auto& one) {
    return one.second.state == State::kEnding && now >= one.second.ends_by;
  });
}

// A change that changes nothing would be announced again and again.
void Membership::Announce(TimePoint now) {
  if (IsOver() || IsToChange()) return;
  if (limits_.resets && generation_ > *limits_.resets) return;  // for a failure alone
  const std::vector<WorkerId> chosen = Candidates();
  AnnounceChange change{generation_, "", {}};
  bool is_starting = false;
  TimePoint first = kNever;  // that has asked
  for (const auto& [id, worker] : workers_) {
    const bool is_member = worker.state == State::kMember;
    if (is_member && !worker.joined) return;
    const bool is_to_go = is_member && std::ranges::find(chosen, id) == chosen.end();
    // Those that are not told stay until the next change.
    if (is_to_go && change.leaving.size() < core::kMostRangesOfNotice) change.leaving.push_back(id);
    if (worker.state == State::kEnding || !IsListed(worker)) continue;
    is_starting = is_starting || worker.state == State::kStarting;
    if (worker.state == State::kReady) first = std::min(first, worker.since);
  }
  const auto coming = std::ranges::count_if(
      chosen, [this](WorkerId id) { return workers_.at(id).state == State::kReady; });
  if (coming == 0 && change.leaving.empty()) return;
  if (coming > 0 && is_starting && now < first + kGatherTime) return;
  change.why = core::CountText(coming, "worker") + (coming == 1 ? " comes" : " come");
  for (const WorkerId id : Members()) workers_.at(id).heard = false;
  for (const WorkerId id : change.leaving) {
    workers_.at(id).leaves = true;
    change.why = "a worker's place on host " + workers_.at(id).host + " is listed no more";
  }
  announced_at_ = now;
  orders_.push_back(std::move(change));
}

// The program has ended well in one worker: the others go on to its end, and nobody comes any more.
void Membership::Finish(TimePoint now) {
  for (const auto& [id, worker] : workers_) {
    if (worker.state != State::kStarting && worker.state != State::kReady) continue;
    if (worker.state == State::kStarting && generation_ == 0) continue;  // so may its program
    if (IsSurvivor(worker) && finished_->empty()) {
      finished_ = finished_first_ + " has ended with exit code 0 while " + NameOf(id, worker.host) +
                  " went on, which has lost its group by that: let all ranks end at the same place";
    }
    Evict(id, "the program has ended elsewhere", now);
  }
  std::vector<WorkerId> killed;
  for (const auto& [id, worker] : workers_) {
    if (!IsKilled(worker) || now < worker.since + limits_.orphan_time) return;
    killed.push_back(id);
  }
  // No process outlives its killing but one that hangs in its host's kernel, maybe for ever.
  const std::string what = killed.empty() ? "" : NamesOf(killed) + std::string(kDoesNotEnd);
  // The first failure is of this generation: what replaces a worker that failed begins another one.
  const auto& [failed, code] = first_failure_.value_or(std::pair(std::string(), 0));
  const std::string& text = finished_->empty() ? failed : *finished_;
  End(!text.empty() && code == 0 ? 1 : code,
      text + (text.empty() || what.empty() ? "" : "; ") + what);
}

void Membership::End(int code, std::string why) {
  if (ended_) return;
  ended_ = true;
  orders_.push_back(EndJob{code, std::move(why)});
}

void Membership::EndForGood(const std::string& what) {
  const auto& [why, code] = first_failure_.value_or(std::pair(last_end_, 1));
  End(code,
      what + "; the first that ended: " + why + (has_had_state_ ? std::string(kStartAgain) : ""));
}

std::vector<ElasticOrder> Membership::TakeOrders(TimePoint now) {
  now_ = now;
  if (!ended_) ForgetOrphans(now);
  if (!ended_) EvictSilent(now);
  if (!ended_) EndIfNobodyIsLeft();
  if (!ended_ && finished_) Finish(now);
  if (!ended_ && !finished_) {
    EvictNotJoined(now);
    Start(now);
    Begin(now);
  }
  if (!ended_ && !finished_) Announce(now);
  return std::exchange(orders_, {});
}

TimePoint Membership::NextTime() const {
  TimePoint next = kNever;
  if (ended_) return next;
  const auto note = [&](TimePoint from, Duration later = Duration::zero()) {
    if (from != kNever && from + later > now_) next = std::min(next, from + later);
  };
  note(over_at_, limits_.timeout);
  if (IsOver()) note(failed_since_, limits_.timeout);
  if (told_at_ == kNever) note(over_at_, limits_.answer_time);
  if (!IsOver()) note(begun_at_, limits_.join_timeout);
  for (const auto& [id, worker] : workers_) {
    note(MustAnswerBy(worker));
    note(worker.ends_by);
    if (worker.state == State::kReady && !IsOver()) note(worker.since, kGatherTime);
    if (worker.state == State::kEnding) note(worker.since, limits_.timeout);
    if (finished_ && IsKilled(worker)) note(worker.since, limits_.orphan_time);
  }
  for (const std::string& name : host_order_) note(hosts_.at(name).not_before);
  return next;
}

}  // namespace sirtaki::launch
