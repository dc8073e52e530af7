#include "launch/elastic/membership.h"

#include <algorithm>

namespace sirtaki::launch {

using core::Duration;
using core::TimePoint;

namespace {

// A member that others have lost is killed if it has not asked by then.
constexpr auto kSuspectTime = std::chrono::milliseconds(200);
// Workers that come soon after each other come by one change.
constexpr auto kGatherTime = std::chrono::milliseconds(300);
// Two members that have lost each other in that many generations in a row do not train together.
constexpr int kMostQuarrels = 3;

std::string NameOf(WorkerId id, const std::string& host) {
  return "worker " + std::to_string(id) + " on host " + host;
}

std::string SecondsText(Duration time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
}

}  // namespace

int Membership::Count(State state) const {
  return static_cast<int>(std::ranges::count_if(
      workers_, [state](const auto& one) { return one.second.state == state; }));
}

bool Membership::IsWanted(const Worker& worker) const {
  return worker.state != State::kEnding && IsListed(worker);
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
  if (generation_ == 0 && !IsOver()) over_at_ = now;
  for (const auto& [id, worker] : workers_) {
    const bool is_in_use = worker.state == State::kMember || worker.member_of == generation_;
    if (!IsListed(worker) && (!is_in_use || generation_ == 0)) {
      Evict(id, "its host is listed no more");
    }
  }
}

void Membership::NoteReady(WorkerId worker, const std::vector<WorkerId>& suspects, TimePoint now) {
  const auto found = workers_.find(worker);
  if (found == workers_.end() || found->second.state == State::kEnding) return;
  Worker& asking = found->second;
  const bool was_member = asking.state == State::kMember;
  if (asking.state != State::kReady) asking.since = now;
  asking.state = State::kReady;
  if (finished_) return;
  for (const WorkerId id : suspects) {
    const auto other = workers_.find(id);
    if (id == worker || other == workers_.end() || other->second.member_of != asking.member_of)
      continue;
    suspicions_.insert({worker, id});
    other->second.suspected_at = std::min(other->second.suspected_at, now);
  }
  if (was_member) GoOver(NameOf(worker, asking.host) + " has asked for another group", now);
}

void Membership::NoteJoined(WorkerId worker, int generation) {
  const auto found = workers_.find(worker);
  if (found == workers_.end() || generation != generation_) return;
  if (found->second.state == State::kMember) found->second.joined = true;
}

void Membership::NoteHeard(WorkerId worker, int generation) {
  const auto found = workers_.find(worker);
  if (found != workers_.end() && generation == generation_) found->second.heard = true;
}

void Membership::NoteEnd(WorkerId worker, WorkerEnd how, const std::string& why, TimePoint now) {
  const auto found = workers_.find(worker);
  if (found == workers_.end()) return;
  const Worker was = found->second;
  workers_.erase(found);
  if (was.state == State::kEnding) return;
  // One that ends well before it has taken part is of no use where others train.
  const bool is_well =
      how == WorkerEnd::kFinished && (was.state == State::kMember || generation_ == 0);
  if (is_well) {
    if (!finished_) finished_.emplace();
    return;
  }
  last_end_ = NameOf(worker, was.host) + ": " + why;
  if (finished_ && finished_->empty()) finished_ = last_end_;
  Blame(was, now);
  if (was.state == State::kMember) GoOver(last_end_, now);
}

// ---- what follows ----

void Membership::GoOver(const std::string& why, TimePoint now) {
  if (IsOver() || finished_) return;
  over_at_ = now;
  const std::vector<WorkerId> left = Members();
  if (!left.empty()) orders_.push_back(EndGeneration{generation_, left, why});
}

// The host's next worker has to wait, the longer the sooner its workers fail one after the other.
void Membership::Blame(const Worker& worker, TimePoint now) {
  Host& host = hosts_.at(worker.host);
  const bool has_lasted =
      worker.first_begun != kNever && now - worker.first_begun > limits_.cooldown_most;
  host.failures = has_lasted ? 1 : host.failures + 1;
  Duration time = limits_.cooldown_least;
  for (int i = 1; i < host.failures && time < limits_.cooldown_most; ++i) time *= 2;
  host.not_before = std::max(host.not_before, now + std::min(time, limits_.cooldown_most));
}

void Membership::Evict(WorkerId id, const std::string& why) {
  Worker& worker = workers_.at(id);
  if (worker.state == State::kEnding) return;
  worker.state = State::kEnding;
  orders_.push_back(EndWorker{id, why});
}

// Evicts it because something is wrong with it.
void Membership::Drop(WorkerId id, const std::string& why, TimePoint now) {
  const Worker& worker = workers_.at(id);
  Blame(worker, now);
  last_end_ = NameOf(id, worker.host) + ": " + why;
  Evict(id, last_end_);
}

// Of one that is starting, or is to leave a generation that is over. One that is busy answers at once,
// and asks later.
TimePoint Membership::MustAskBy(const Worker& worker) const {
  if (worker.state == State::kStarting) return worker.since + limits_.timeout;
  if (worker.state != State::kMember || !IsOver()) return kNever;
  if (worker.heard) return over_at_ + limits_.timeout;
  if (worker.suspected_at != kNever) return worker.suspected_at + kSuspectTime;
  return over_at_ + limits_.answer_time;
}

void Membership::EvictSilent(TimePoint now) {
  for (const auto& [id, worker] : workers_) {
    if (now < MustAskBy(worker)) continue;
    Drop(id,
         worker.state == State::kMember ? "it does not leave its group"
                                        : "its program does not begin",
         now);
  }
}

void Membership::EvictNotJoined(TimePoint now) {
  if (IsOver() || begun_at_ == kNever || now < begun_at_ + limits_.join_timeout) return;
  begun_at_ = kNever;
  for (const auto& [id, worker] : workers_) {
    if (worker.state != State::kMember || worker.joined) continue;
    Drop(id, "it has not come to the others in time", now);
    GoOver(last_end_, now);
  }
}

// Members that lose each other again and again would do so for ever. True: one of them has to go.
bool Membership::EvictOneOfAQuarrel(TimePoint now) {
  if (weighed_) return false;
  weighed_ = true;
  std::map<Pair, int> quarrels;
  std::map<WorkerId, int> accusers;
  for (const Suspicion& one : suspicions_) {
    const auto by = workers_.find(one.of);
    const auto against = workers_.find(one.against);
    if (by == workers_.end() || against == workers_.end()) continue;
    if (by->second.state != State::kReady || against->second.state != State::kReady) continue;
    const Pair pair = std::minmax(one.of, one.against);
    quarrels[pair] = quarrels_[pair] + 1;
    ++accusers[one.against];
  }
  quarrels_ = quarrels;
  for (const auto& [pair, times] : quarrels_) {
    if (times < kMostQuarrels) continue;
    const WorkerId one = accusers[pair.first] > accusers[pair.second] ? pair.first : pair.second;
    const WorkerId other = one == pair.first ? pair.second : pair.first;
    Drop(one,
         "it and " + NameOf(other, workers_.at(other).host) + " have lost each other " +
             std::to_string(times) + " times",
         now);
    quarrels_.clear();
    return true;
  }
  return false;
}

std::vector<int> Membership::FreeSlots(const std::string& name, const Host& host) const {
  std::set<int> taken;
  for (const auto& [id, worker] : workers_) {
    if (worker.host == name) taken.insert(worker.slot);
  }
  std::vector<int> free;
  for (int slot = 0; slot < host.slots; ++slot) {
    if (!taken.contains(slot)) free.push_back(slot);
  }
  return free;
}

void Membership::Start(TimePoint now) {
  auto room = limits_.max_ranks - std::ranges::count_if(workers_, [this](const auto& one) {
                return IsWanted(one.second);
              });
  for (const std::string& name : host_order_) {
    const Host& host = hosts_.at(name);
    if (now < host.not_before) continue;
    for (const int slot : FreeSlots(name, host)) {
      if (room-- <= 0) return;
      Worker& worker = workers_[next_worker_];
      worker.host = name;
      worker.slot = slot;
      worker.since = now;
      orders_.push_back(StartWorker{next_worker_++, name, slot});
    }
  }
}

// Those that have asked, at most as many as there may be: members of the last generation first. Those
// of a host follow each other.
std::vector<WorkerId> Membership::Candidates() const {
  std::vector<WorkerId> chosen;
  for (const bool members : {true, false}) {
    for (const auto& [id, worker] : workers_) {
      const bool is_one = worker.member_of > 0 && worker.member_of == generation_;
      if (worker.state != State::kReady || !IsListed(worker) || is_one != members) continue;
      if (static_cast<int>(chosen.size()) < limits_.max_ranks) chosen.push_back(id);
    }
  }
  std::vector<std::string> order;
  for (const WorkerId id : chosen) order.push_back(workers_.at(id).host);
  std::ranges::stable_sort(chosen, {}, [&](WorkerId id) {
    return std::ranges::find(order, workers_.at(id).host) - order.begin();
  });
  return chosen;
}

// A worker that is being killed may still be in the memory of its host's others. Where nobody has
// trained before, those that are being started are waited for, as long as there is time.
bool Membership::MustWait(const std::vector<WorkerId>& chosen, bool is_late) const {
  const auto here = [&](const std::string& host) {
    return std::ranges::any_of(chosen, [&](WorkerId id) { return workers_.at(id).host == host; });
  };
  const bool all_new =
      std::ranges::none_of(chosen, [this](WorkerId id) { return workers_.at(id).member_of > 0; });
  return std::ranges::any_of(workers_, [&](const auto& one) {
    const Worker& worker = one.second;
    return worker.state == State::kMember ||
           (worker.state == State::kEnding && here(worker.host)) ||
           (worker.state == State::kStarting && all_new && !is_late);
  });
}

void Membership::Begin(TimePoint now) {
  if (!IsOver()) return;
  const bool is_late = now >= over_at_ + limits_.timeout;
  std::vector<WorkerId> chosen = Candidates();
  const bool are_enough = static_cast<int>(chosen.size()) >= limits_.min_ranks;
  if (!are_enough && is_late) {
    return End(1, "only " + std::to_string(chosen.size()) + " of at least " +
                      std::to_string(limits_.min_ranks) + " workers are there after " +
                      SecondsText(limits_.timeout) +
                      (last_end_.empty() ? "" : "; the last that ended: " + last_end_));
  }
  if (!are_enough || MustWait(chosen, is_late)) return;
  if (EvictOneOfAQuarrel(now)) return Begin(now);
  if (limits_.resets && generation_ > *limits_.resets) {
    return End(1, "the workers have changed " + std::to_string(generation_) +
                      " times, which --reset-limit " + std::to_string(*limits_.resets) +
                      " does not allow; the last that ended: " + last_end_);
  }
  ++generation_;
  over_at_ = kNever;
  begun_at_ = now;
  announced_ = weighed_ = false;
  suspicions_.clear();
  for (auto& [id, worker] : workers_) {
    if (worker.state == State::kReady && !IsListed(worker)) Evict(id, "its host is listed no more");
  }
  for (const WorkerId id : chosen) {
    Worker& worker = workers_.at(id);
    worker.state = State::kMember;
    worker.member_of = generation_;
    worker.joined = worker.heard = false;
    worker.suspected_at = kNever;
    worker.first_begun = std::min(worker.first_begun, now);
  }
  orders_.push_back(BeginGeneration{generation_, std::move(chosen)});
}

// Empty: none does.
std::string Membership::ChangeThatWaits(TimePoint now) const {
  int staying = 0;
  int waiting = 0;
  bool is_starting = false;
  std::string why;
  TimePoint first = kNever;
  for (const auto& [id, worker] : workers_) {
    const bool is_member = worker.state == State::kMember;
    if (is_member && !worker.joined) return "";
    if (is_member && !IsListed(worker)) why = "host " + worker.host + " is listed no more";
    if (!IsWanted(worker)) continue;
    staying += is_member ? 1 : 0;
    is_starting = is_starting || worker.state == State::kStarting;
    if (worker.state != State::kReady) continue;
    ++waiting;
    first = std::min(first, worker.since);
  }
  if (staying + waiting < limits_.min_ranks) return "";  // until there are enough
  if (!why.empty()) return why;
  const int more = std::min(waiting, limits_.max_ranks - staying);
  if (more <= 0 || (is_starting && now < first + kGatherTime)) return "";
  return std::to_string(more) + (more == 1 ? " worker comes" : " workers come");
}

void Membership::Announce(TimePoint now) {
  if (IsOver() || announced_) return;
  const std::string why = ChangeThatWaits(now);
  if (why.empty()) return;
  announced_ = true;
  orders_.push_back(AnnounceChange{generation_, why});
}

void Membership::End(int code, std::string why) {
  ended_ = true;
  orders_.push_back(EndJob{code, std::move(why)});
}

std::vector<ElasticOrder> Membership::TakeOrders(TimePoint now) {
  if (!ended_ && finished_) {
    for (const auto& [id, worker] : workers_) {
      if (worker.state != State::kStarting && worker.state != State::kReady) continue;
      const bool is_one = worker.member_of > 0 && worker.member_of == generation_;
      if (is_one && finished_->empty()) {
        finished_ = NameOf(id, worker.host) + " has lost its group after another one had finished";
      }
      Evict(id, "the program has ended elsewhere");
    }
    if (workers_.empty()) End(finished_->empty() ? 0 : 1, *finished_);
  } else if (!ended_) {
    EvictNotJoined(now);
    EvictSilent(now);
    Start(now);
    Begin(now);
    if (!ended_) Announce(now);
  }
  return std::exchange(orders_, {});
}

TimePoint Membership::NextTime(TimePoint now) const {
  TimePoint next = kNever;
  if (ended_ || finished_) return next;
  const auto note = [&](TimePoint time) {
    if (time > now) next = std::min(next, time);
  };
  if (IsOver()) note(over_at_ + limits_.timeout);
  if (!IsOver() && begun_at_ != kNever) note(begun_at_ + limits_.join_timeout);
  for (const auto& [id, worker] : workers_) {
    note(MustAskBy(worker));
    if (worker.state == State::kReady && !IsOver()) note(worker.since + kGatherTime);
  }
  for (const std::string& name : host_order_) note(hosts_.at(name).not_before);
  return next;
}

}  // namespace sirtaki::launch
