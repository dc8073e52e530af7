// These functions choose who is started, and who takes part in the next generation.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "core/base/text.h"
#include "launch/base/shell_text.h"
#include "launch/elastic/membership.h"
#include "launch/elastic/membership_texts.h"

namespace sirtaki::launch {

using core::TimePoint;

namespace {

// Two members that have lost each other in that many generations in a row do not train together.
constexpr int kMostQuarrels = 3;
// That many generations in a row that do not come together are no accident; more, where nobody says whom
// it misses.
constexpr int kMostFailedBegins = 2;
constexpr int kMostUnexplained = 4;

}  // namespace

// Members that lose each other again and again would do so for ever. True: one of them has to go.
bool Membership::EvictOneOfAQuarrel(TimePoint now) {
  if (weighed_) return false;
  weighed_ = true;
  std::map<Pair, int> quarrels;
  std::map<WorkerId, int> accusers;
  for (const Suspicion& one : suspicions_) {
    const Pair pair = std::minmax(one.of, one.against);
    quarrels[pair] = quarrels_[pair] + 1;
    ++accusers[one.against];
  }
  quarrels_ = quarrels;
  for (const auto& [pair, times] : quarrels_) {
    if (times < kMostQuarrels) continue;
    WorkerId one = accusers[pair.first] > accusers[pair.second] ? pair.first : pair.second;
    const WorkerId spared = one == pair.first ? pair.second : pair.first;
    if (workers_.at(one).has_state && !workers_.at(spared).has_state) one = spared;
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

// Nothing is started beside one that was killed and has not ended: a generation with both would wait.
void Membership::Start(TimePoint now) {
  if (is_last_hope_) return;
  const bool is_first = next_worker_ == 0;
  auto room = limits_.max_ranks - Alive();
  for (const std::string& name : host_order_) {
    const Host& host = hosts_.at(name);
    if (now < host.not_before || HasKilled(name)) continue;
    for (const int slot : FreeSlots(name, host)) {
      if (room-- <= 0) break;
      Worker& worker = workers_[next_worker_];
      worker.host = name;
      worker.slot = slot;
      worker.since = now;
      orders_.push_back(StartWorker{next_worker_++, name, slot});
    }
  }
  if (is_first) first_workers_ = next_worker_;
}

// Candidates are those that have asked, at most as many as there may be: survivors first, then others.
// While a generation goes on its members count as survivors. Those that leave are taken where nobody
// else has the state, or where there are too few: as many as are needed, and more where others leave
// places. Those of a host follow each other by their slots, behind rank 0. A generation that goes on is
// not disturbed for one that would have to wait until another one on its host has ended.
std::vector<WorkerId> Membership::Candidates() const {
  std::vector<WorkerId> survivors;
  std::vector<WorkerId> leaving;
  std::vector<WorkerId> others;
  for (const auto& [id, worker] : workers_) {
    const bool is_member = worker.state == State::kMember && !IsOver();
    if (is_member || IsSurvivor(worker)) {
      (Stays(worker) ? survivors : leaving).push_back(id);
    } else if (worker.state == State::kReady && IsListed(worker) &&
               (IsOver() || !HasKilled(worker.host))) {
      others.push_back(id);
    }
  }
  // The one that has trained longest is rank 0, whose state all others take: a newer one may have lost
  // its group before it had taken the state.
  const auto age = [&](WorkerId id) { return AgeOf(workers_.at(id)); };
  const auto have_state = [&](const std::vector<WorkerId>& some) {
    return std::ranges::any_of(some, [&](WorkerId id) { return workers_.at(id).has_state; });
  };
  std::ranges::stable_sort(survivors, {}, age);
  std::ranges::stable_sort(leaving, {}, age);
  const bool lack_state = have_state(leaving) && !have_state(survivors);
  auto needed = limits_.min_ranks - static_cast<std::ptrdiff_t>(survivors.size() + others.size());
  if (survivors.empty() || lack_state) needed = std::max<std::ptrdiff_t>(needed, 1);
  std::vector<WorkerId> chosen = std::move(survivors);
  if (needed > 0) {
    const auto rest = leaving.begin() + std::min(needed, std::ssize(leaving));
    chosen.insert(lack_state ? chosen.begin() : chosen.end(), leaving.begin(), rest);
    others.insert(others.end(), rest, leaving.end());
  }
  chosen.insert(chosen.end(), others.begin(), others.end());
  const auto most = static_cast<std::size_t>(limits_.max_ranks);
  if (chosen.size() > most) chosen.resize(most);
  std::vector<std::string> order;
  for (const WorkerId id : chosen) order.push_back(workers_.at(id).host);
  const WorkerId first = chosen.empty() ? 0 : chosen.front();
  std::ranges::stable_sort(chosen, {}, [&](WorkerId id) {
    const Worker& worker = workers_.at(id);
    const auto host = std::ranges::find(order, worker.host) - order.begin();
    return std::tuple(host, id != first, worker.slot);
  });
  return chosen;
}

// A program chooses its GPU by its local rank in its first generation, and keeps it. So newcomers get
// the lowest slots that nobody keeps: lower ones than theirs may be free by now, or those of workers
// that have not come yet. Precondition: none of their hosts has a worker that is ending.
void Membership::SettleSlots(const std::vector<WorkerId>& chosen) {
  std::set<std::pair<std::string, int>> kept;
  for (const auto& [id, worker] : workers_) {
    if (worker.member_of > 0) kept.insert({worker.host, worker.slot});
  }
  for (const WorkerId id : chosen) {
    Worker& worker = workers_.at(id);
    if (worker.member_of > 0) continue;
    int slot = 0;
    while (kept.contains({worker.host, slot})) ++slot;
    for (auto& [other_id, other] : workers_) {
      if (other.host == worker.host && other.slot == slot) other.slot = worker.slot;
    }
    worker.slot = slot;
    kept.insert({worker.host, slot});
  }
}

// A worker that is ending may still be in the memory of its host's others. Where nobody has trained
// before, those that are being started are waited for, as long as there is time.
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

// A worker that was killed and does not end, since it hangs in its host's kernel, say, keeps that host
// from training. The others go on without it if they can. True: its other workers were dropped, or the
// job has ended.
bool Membership::LeaveHostsThatHang(const std::vector<WorkerId>& chosen, bool is_late,
                                    TimePoint now) {
  if (HasAny(State::kMember)) return false;  // who is there is not known yet
  std::map<std::string, WorkerId> hang;
  for (const auto& [id, worker] : workers_) {
    const bool hangs = IsKilled(worker) && now >= worker.since + limits_.timeout;
    if (hangs) hang.insert({worker.host, id});
  }
  std::vector<WorkerId> there;
  for (const WorkerId id : chosen) {
    if (hang.contains(workers_.at(id).host)) there.push_back(id);
  }
  if (there.empty()) return false;
  int others = 0;
  bool have_state = !has_had_state_;
  for (const auto& [id, worker] : workers_) {
    if (worker.state != State::kReady || hang.contains(worker.host)) continue;
    others += IsListed(worker) || IsSurvivor(worker) ? 1 : 0;
    have_state = have_state || worker.has_state;
  }
  const WorkerId first = hang.at(workers_.at(there.front()).host);
  if (others < limits_.min_ranks || !have_state) {
    if (HasAny(State::kStarting) && !is_late) return false;
    End(1, NameOf(first, workers_.at(first).host) + std::string(kDoesNotEnd));
    return true;
  }
  for (const WorkerId id : there) {
    const std::string& host = workers_.at(id).host;
    Drop(id,
         "the others go on without its host: " + NameOf(hang.at(host), host) +
             std::string(kDoesNotEnd),
         now);
  }
  return true;
}

void Membership::ForgetFailedBegins() {
  failed_begins_ = 0;
  failed_since_ = kNever;
  least_from_ = 0;
  are_apart_ = false;
}

// Hosts that sirtakirun reaches may not reach each other, and no group with both begins. The workers go
// of the host that most others name; in a tie those that joined later, and never all that have the
// state. True: some were dropped.
bool Membership::DropUnreached(TimePoint now) {
  if (failed_begins_ < kMostFailedBegins) return false;
  struct Side {
    std::set<std::string> accusers;
    std::vector<WorkerId> workers;
    bool has_state = false;
    bool has_joined = false;
    TimePoint oldest = kNever;
  };
  std::map<std::string, Side> sides;
  for (const auto& [id, worker] : workers_) {
    if (!IsSurvivor(worker)) continue;
    Side& side = sides[worker.host];
    side.workers.push_back(id);
    side.has_state |= worker.has_state;
    side.has_joined |= worker.has_joined;
    side.oldest = std::min(side.oldest, worker.first_begun);
  }
  if (sides.size() < 2) return false;
  for (const Suspicion& one : suspicions_) {
    const std::string& by = workers_.at(one.of).host;
    const std::string& against = workers_.at(one.against).host;
    if (by != against) sides.at(against).accusers.insert(by);
  }
  const bool is_explained =
      std::ranges::any_of(sides, [](const auto& one) { return !one.second.accusers.empty(); });
  if (!is_explained && failed_begins_ < kMostUnexplained) return false;
  const auto weight = [is_explained](const auto& one) {
    const Side& side = one->second;
    return std::tuple(!is_explained || !side.accusers.empty(), !side.has_state,
                      side.accusers.size(), !side.has_joined, side.oldest, side.workers.front());
  };
  auto victim = sides.begin();
  for (auto at = sides.begin(); at != sides.end(); ++at) {
    if (weight(at) > weight(victim)) victim = at;
  }
  const auto& accusers = victim->second.accusers;
  const std::string others = is_explained ? "host " + Joined(accusers, ", ") : "the others";
  for (const WorkerId id : victim->second.workers) {
    Drop(id,
         "no group begins with it: its host and " + others +
             " do not reach each other; look at the network between them",
         now);
  }
  failed_begins_ = kMostFailedBegins - 1;
  are_apart_ = true;
  return true;
}

// A host that ssh reaches and other connections do not would keep the others from training. True: some
// were dropped.
bool Membership::DropThoseThatNeverJoin(TimePoint now) {
  if (failed_begins_ < kMostFailedBegins) return false;
  std::vector<WorkerId> never;
  bool has_any = false;
  for (const auto& [id, worker] : workers_) {
    if (worker.state != State::kReady) continue;
    has_any = has_any || worker.has_joined;
    if (!worker.has_joined && worker.member_of > 0) never.push_back(id);
  }
  if (!has_any || never.empty()) return false;
  failed_begins_ = 0;
  are_apart_ = true;
  for (const WorkerId id : never) {
    Drop(id, "no group begins with it: its host may let ssh through and no other connection", now);
  }
  return true;
}

// No group has begun for as long as the job may wait: once the fewest try that may train, which are the
// oldest. True: the others were dropped, or the job has ended.
bool Membership::GoDownToTheLeast(const std::vector<WorkerId>& chosen, TimePoint now) {
  if (failed_since_ == kNever || now < failed_since_ + limits_.timeout) return false;
  if (!are_apart_ && failed_begins_ < kMostFailedBegins) return false;
  const auto least = static_cast<std::size_t>(limits_.min_ranks);
  if (least_from_ > generation_) return false;  // they are about to
  if (least_from_ > 0 || chosen.size() <= least) {
    End(1, "no group of at least " + std::to_string(limits_.min_ranks) +
               " workers has come together for " + core::DurationText(limits_.timeout) +
               LastEndText(last_end_) + " (--min-np, --elastic-timeout)");
    return true;
  }
  least_from_ = generation_ + 1;
  std::vector<WorkerId> by_age = chosen;
  std::ranges::stable_sort(by_age, {}, [this](WorkerId id) { return AgeOf(workers_.at(id)); });
  for (std::size_t i = least; i < by_age.size(); ++i) {
    Drop(by_age[i], "no group has begun with it for " + core::DurationText(limits_.timeout), now);
  }
  return true;
}

TimePoint Membership::LateAt() const {
  const bool are_apart = are_apart_ && !HasAny(State::kMember);
  return (are_apart ? failed_since_ : over_at_) + limits_.timeout;
}

void Membership::Begin(TimePoint now) {
  if (!IsOver()) return;
  const bool is_late = now >= LateAt();
  std::vector<WorkerId> chosen = Candidates();
  const bool are_enough = static_cast<int>(chosen.size()) >= limits_.min_ranks;
  if (!are_enough && is_late) {
    return End(1, "only " + std::to_string(chosen.size()) + " of at least " +
                      std::to_string(limits_.min_ranks) + " workers are there after " +
                      core::DurationText(limits_.timeout) + LastEndText(last_end_) +
                      " (--min-np, --elastic-timeout)");
  }
  if (!are_enough) return;
  if (MustWait(chosen, is_late)) {
    if (!LeaveHostsThatHang(chosen, is_late, now)) return;
    return ended_ ? void() : Begin(now);
  }
  const auto goes_on = [this](WorkerId id) {
    const auto found = workers_.find(id);
    return found != workers_.end() && IsSurvivor(found->second);
  };
  // What is said by or of a worker that has gone counts no more.
  std::erase_if(suspicions_,
                [&](const Suspicion& one) { return !goes_on(one.of) || !goes_on(one.against); });
  if (GoDownToTheLeast(chosen, now)) return ended_ ? void() : Begin(now);
  if (DropUnreached(now) || EvictOneOfAQuarrel(now) || DropThoseThatNeverJoin(now))
    return Begin(now);
  if (limits_.resets && generation_ > *limits_.resets) {
    const std::string times = generation_ == 1 ? "once" : std::to_string(generation_) + " times";
    return End(1, "the workers have changed " + times + ", which --reset-limit " +
                      std::to_string(*limits_.resets) + " does not allow" + LastEndText(last_end_));
  }
  const bool has_state =
      std::ranges::any_of(chosen, [&](WorkerId id) { return workers_.at(id).has_state; });
  if (has_had_state_ && !has_state) {
    return EndForGood(
        "nobody is left who has trained, and the workers that are there would begin again from "
        "nothing");
  }
  SettleSlots(chosen);
  chosen = Candidates();  // by their slots
  ++generation_;
  first_failure_.reset();
  ++failed_begins_;  // until all have joined, or one has ended
  failed_since_ = std::min(failed_since_, now);
  over_at_ = told_at_ = kNever;
  begun_at_ = now;
  announced_at_ = kNever;
  weighed_ = false;
  suspicions_.clear();
  std::vector<int> slots;
  for (const WorkerId id : chosen) {
    Worker& worker = workers_.at(id);
    slots.push_back(worker.slot);
    worker.state = State::kMember;
    worker.member_of = generation_;
    worker.joined = worker.heard = worker.leaves = false;
    worker.suspected_at = kNever;
    worker.first_begun = std::min(worker.first_begun, now);
  }
  for (const auto& [id, worker] : workers_) {
    const bool is_of_no_use = worker.state == State::kReady && !IsListed(worker);
    if (is_of_no_use) Evict(id, "its place is listed no more", now);
  }
  orders_.push_back(BeginGeneration{generation_, std::move(chosen), std::move(slots)});
}

}  // namespace sirtaki::launch
