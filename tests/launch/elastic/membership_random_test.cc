// Random schedules: workers that die, stop, finish and lose their hosts at any time, messages that come
// late, hosts that are listed and unlisted, and some that never come back. The membership must decide each
// generation once, with everybody's confirmation, and never let two that are in different generations
// share memory. It must come to rest with everybody who is there, or end for a reason that holds.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "launch/elastic/membership.h"
#include "tests/support/test_scale.h"

namespace sirtaki::launch {
namespace {

using core::Duration;
using core::TimePoint;
using std::chrono::milliseconds;
using std::chrono::seconds;

// An event is done at its time.
struct Event {
  TimePoint at;
  int number = 0;
  std::function<void()> what;
  bool operator<(const Event& other) const {
    return std::pair(at, number) > std::pair(other.at, other.number);
  }
};

// A program's process.
struct Process {
  std::string host;
  int slot = -1;         // that it keeps; -1: none yet
  bool stopped = false;  // SIGSTOP, or its host is gone: it does nothing any more
  bool asks = false;     // it waits for a generation
  int was = 0;           // in this generation before
  int inside = 0;        // the generation whose memory it may use; 0: none
  bool joined = false;
};

class World {
 public:
  explicit World(std::uint64_t seed) : random_(seed), membership_(MakeLimits()) {}

  void Run() {
    Relist();
    for (int i = 0; i < 12; ++i) {
      At(milliseconds(Draw(0, 20'000)), [this] { Fault(); });
    }
    Drive(start_ + seconds(20));
    // In the end all hosts are there, or one is and the others are lost, or these are listed no more.
    const int end = Draw(0, 5);
    const bool stays_poor = end == 0;
    const bool is_left = end == 1;
    for (const std::string& host : kHosts) {
      const bool is_other = host != kHosts.front();
      if (stays_poor && is_other) {
        LoseHost(host, /*comes_back=*/false);
      } else {
        gone_.erase(host);
      }
      if (is_other && (stays_poor || is_left)) {
        listed_.erase(host);
      } else {
        listed_.insert(host);
      }
    }
    ++changes_;
    membership_.TakeHosts(Listed(), now_);
    Carry();
    // Cooldowns are at most 8 s, starts and messages 1 s, a host's silence and the time-out 80 s.
    Drive(start_ + seconds(stays_poor ? 150 : 90));
    if (is_left) return CheckLeft();
    Check(stays_poor ? 1 : static_cast<int>(kHosts.size()));
  }

  const std::string& how_it_ended() const { return how_it_ended_; }
  bool has_stopped() const { return has_stopped_; }

 private:
  static inline const std::vector<std::string> kHosts = {"a", "b", "c"};

  ElasticLimits MakeLimits() {
    ElasticLimits limits;
    limits.min_ranks = Draw(1, 3);
    limits.max_ranks = limits.min_ranks + Draw(0, 4);
    limits.timeout = seconds(60);
    limits.join_timeout = seconds(10);
    limits.cooldown_most = seconds(8);
    if (Draw(0, 4) == 0) limits.resets = Draw(0, 6);
    return limits_ = limits;
  }
  int Draw(int least, int most) { return std::uniform_int_distribution<int>(least, most)(random_); }
  void At(Duration later, std::function<void()> what) {
    events_.push({now_ + later, number_++, std::move(what)});
  }
  Duration Late() { return milliseconds(Draw(0, 3) == 0 ? Draw(0, 1000) : Draw(0, 20)); }

  std::vector<HostSlots> Listed() const {
    std::vector<HostSlots> hosts;
    for (const std::string& host : kHosts) {
      if (listed_.contains(host)) hosts.push_back({host, kSlots});
    }
    return hosts;
  }
  void Relist() {
    listed_.clear();
    for (const std::string& host : kHosts) {
      if (Draw(0, 3) != 0) listed_.insert(host);
    }
    if (listed_.empty()) listed_.insert("a");
    ++changes_;
    membership_.TakeHosts(Listed(), now_);
    Carry();
  }

  void Drive(TimePoint until) {
    while (!ended_) {
      const TimePoint next =
          std::min(events_.empty() ? TimePoint::max() : events_.top().at, membership_.NextTime());
      if (next > until) break;
      now_ = std::max(now_, next);
      while (!events_.empty() && events_.top().at <= now_) {
        const auto what = events_.top().what;
        events_.pop();
        what();
      }
      Carry();
    }
    now_ = until;
  }

  void Fault() {
    std::vector<WorkerId> all;
    for (const auto& [id, process] : processes_) all.push_back(id);
    if (all.empty()) return;
    const WorkerId id = all[static_cast<std::size_t>(Draw(0, static_cast<int>(all.size()) - 1))];
    switch (Draw(0, 9) == 0 ? Draw(5, 6) : Draw(0, 4)) {
      case 0:
      case 1:
        return Die(id, WorkerEnd::kFailed);
      case 2:
        if (!IsMissed(id)) return;
        processes_[id].stopped = true;
        for (const auto& [other, process] : processes_) Suspect(other, id);
        return;
      case 3:
        return LoseHost(processes_[id].host, /*comes_back=*/true);
      case 5:
        return Finish(processes_[id].inside);
      case 6:
        return GiveUp(processes_[id].inside);
      default:
        return Relist();
    }
  }

  // Whether another member of its generation would miss it.
  bool IsMissed(WorkerId id) {
    const int generation = processes_[id].inside;
    return generation > 0 && std::ranges::any_of(processes_, [&](const auto& other) {
             return other.first != id && other.second.inside == generation && !other.second.stopped;
           });
  }

  void Die(WorkerId id, WorkerEnd how) {
    const auto found = processes_.find(id);
    if (found == processes_.end()) return;
    const int inside = found->second.inside;
    const bool is_gone = gone_.contains(found->second.host);
    ++changes_;
    processes_.erase(found);
    // A host tells of its workers' ends, unless it is gone: then its silence is noticed.
    At(is_gone ? Duration(seconds(1)) : Late(), [this, id, how, is_gone] {
      ++changes_;
      membership_.NoteEnd(id, is_gone ? WorkerEnd::kLost : how, "it", now_);
    });
    if (inside == 0) return;
    for (const auto& [other, process] : processes_) Suspect(other, id);
  }

  // The programs of a generation come to their end, if they are together.
  void Finish(int generation) {
    const auto is_together = [&](WorkerId id) {
      const auto found = processes_.find(id);
      return found != processes_.end() && found->second.joined && !found->second.stopped &&
             found->second.inside == generation;
    };
    if (generation == 0 || !std::ranges::all_of(begun_[generation], is_together)) return;
    for (const WorkerId id : begun_[generation]) {
      At(Late(), [this, id, generation] {
        const auto found = processes_.find(id);
        if (found == processes_.end() || found->second.inside != generation) return;
        has_finished_ = true;
        processes_.erase(found);
        At(Late(), [this, id] { membership_.NoteEnd(id, WorkerEnd::kFinished, "", now_); });
      });
    }
  }

  // The members find that what was trained is lost, say so, and end.
  void GiveUp(int generation) {
    if (generation == 0) return;
    for (const WorkerId id : begun_[generation]) {
      At(Late(), [this, id, generation] {
        const auto found = processes_.find(id);
        if (found == processes_.end() || found->second.inside != generation) return;
        if (found->second.stopped || killed_.contains(id)) return;
        membership_.NoteCannotGoOn(id, generation, "it is lost", std::nullopt, now_);
        has_given_up_ = true;
        Die(id, WorkerEnd::kFailed);
      });
    }
  }

  void LoseHost(std::string host, bool comes_back) {  // the worker that names it dies here
    gone_.insert(host);
    std::vector<WorkerId> there;
    for (const auto& [id, process] : processes_) {
      if (process.host == host) there.push_back(id);
    }
    for (const WorkerId id : there) Die(id, WorkerEnd::kLost);
    if (comes_back) At(milliseconds(Draw(1000, 5000)), [this, host] { gone_.erase(host); });
  }

  // A process that is in a generation with one that is gone leaves it, sooner or later.
  void Suspect(WorkerId id, WorkerId lost) {
    const int generation = processes_[id].inside;
    if (generation == 0 || !begun_[generation].contains(lost)) return;
    At(milliseconds(100) + Late(), [this, id, lost, generation] {
      const auto found = processes_.find(id);
      if (found == processes_.end() || found->second.inside != generation) return;
      Ask(id, {lost});
    });
  }

  void Ask(WorkerId id, const std::vector<WorkerId>& suspects) {
    Process& process = processes_[id];
    if (process.stopped || process.asks) return;
    process.asks = true;
    process.was = process.inside;
    process.inside = 0;
    process.joined = false;
    At(Late(), [this, id, left = process.was, suspects] {
      membership_.NoteReady(id, left, suspects, now_);
    });
  }

  void Carry() {
    for (const ElasticOrder& order : membership_.TakeOrders(now_)) {
      std::visit([this](const auto& one) { Do(one); }, order);
    }
  }

  void Do(const StartWorker& order) {
    ASSERT_FALSE(has_given_up_);
    ASSERT_FALSE(processes_.contains(order.worker));
    const auto there = std::ranges::count_if(
        processes_, [&](const auto& one) { return one.second.host == order.host; });
    ASSERT_LT(there, kSlots) << "all slots of host " << order.host << " are taken";
    ASSERT_TRUE(listed_.contains(order.host));
    const WorkerId id = order.worker;
    if (gone_.contains(order.host)) {
      At(Late(), [this, id] {
        ++changes_;
        membership_.NoteEnd(id, WorkerEnd::kFailed, "no ssh", now_);
      });
      return;
    }
    processes_[id].host = order.host;
    At(milliseconds(500) + Late(), [this, id] {
      if (processes_.contains(id)) Ask(id, {});
    });
  }
  void Do(const EndWorker& order) {
    const auto killed = processes_.find(order.worker);
    if (order.why == "its place is listed no more" && killed != processes_.end()) {
      const int last = static_cast<int>(begun_.size());  // the next one begins with the next order
      const bool is_survivor = last > 0 && killed->second.asks && killed->second.was == last;
      ASSERT_TRUE(!is_survivor || leaving_.contains(order.worker))
          << "worker " << order.worker << " may have the only copy of a shard";
    }
    killed_.insert(order.worker);
    if (order.why != "its place is listed no more") ++changes_;
    At(Late(), [this, id = order.worker] { Die(id, WorkerEnd::kFailed); });
  }
  void Do(const AnnounceChange& order) {
    ASSERT_EQ(order.generation, membership_.generation());
    leaving_ = {order.leaving.begin(), order.leaving.end()};
    announced_in_ = order.generation;
    changes_then_ = changes_;
    for (const WorkerId id : order.leaving) {
      ASSERT_TRUE(begun_[order.generation].contains(id));
      const auto found = processes_.find(id);
      if (found == processes_.end()) continue;
      ASSERT_FALSE(listed_.contains(found->second.host)) << "worker " << id << " may stay";
    }
    for (const WorkerId id : begun_[order.generation]) {
      At(Late(), [this, id, generation = order.generation] {
        const auto found = processes_.find(id);
        if (found == processes_.end() || found->second.stopped) return;
        membership_.NoteHeard(id, generation, Membership::Heard::kChange);
      });
    }
    // Its members leave together, once all have been told.
    At(milliseconds(1000), [this, generation = order.generation] {
      for (const WorkerId id : begun_[generation]) {
        const auto found = processes_.find(id);
        if (found == processes_.end() || found->second.stopped) return;
      }
      for (const WorkerId id : begun_[generation]) {
        if (processes_[id].inside == generation) Ask(id, {});
      }
    });
  }
  void Do(const EndGeneration& order) {
    announced_in_ = 0;
    leaving_.clear();  // they have given nothing to the others
    for (const WorkerId id : order.to) {
      At(Late(), [this, id, generation = order.generation] {
        const auto found = processes_.find(id);
        if (found == processes_.end() || found->second.asks) return;
        if (found->second.stopped) {  // the process around it says so
          has_stopped_ = true;
          At(Late(), [this, id, generation] { membership_.NoteStopped(id, generation); });
          return;
        }
        At(Late(), [this, id, generation] {
          membership_.NoteHeard(id, generation, Membership::Heard::kOver);
        });
        // It may be busy.
        At(milliseconds(Draw(0, 3) == 0 ? 8000 : 0), [this, id, generation] {
          const auto there = processes_.find(id);
          if (there != processes_.end() && there->second.inside == generation) Ask(id, {});
        });
      });
    }
  }
  void Do(const BeginGeneration& order) {
    ASSERT_FALSE(has_given_up_) << "it would train from nothing";
    ASSERT_EQ(order.generation, static_cast<int>(begun_.size()) + 1);
    ASSERT_GE(static_cast<int>(order.members.size()), limits_.min_ranks);
    ASSERT_LE(static_cast<int>(order.members.size()), limits_.max_ranks);
    ASSERT_TRUE(!limits_.resets || order.generation <= *limits_.resets + 1);
    begun_at_ = now_;
    apart_since_ = std::min(apart_since_, now_);
    std::set<std::string> hosts;
    std::set<WorkerId> members;
    std::string before;
    for (const WorkerId id : order.members) {
      ASSERT_TRUE(members.insert(id).second) << "worker " << id << " has two places";
      const auto found = processes_.find(id);
      if (found == processes_.end()) continue;  // it has died meanwhile
      ASSERT_TRUE(found->second.asks) << "worker " << id << " has not asked";
      const std::string& host = found->second.host;
      if (host != before) {
        ASSERT_TRUE(hosts.insert(host).second) << host;
      }
      before = host;
    }
    CheckSlots(order);
    for (const auto& [id, process] : processes_) {
      const bool is_here = process.inside > 0 && hosts.contains(process.host);
      ASSERT_FALSE(is_here && !gone_.contains(process.host))
          << "worker " << id << " may still use the memory of generation " << process.inside;
    }
    for (const WorkerId id : order.generation > 1 ? begun_[order.generation - 1] : members) {
      const auto found = processes_.find(id);
      const bool is_free = found == processes_.end() || found->second.inside == 0 ||
                           killed_.contains(id) || gone_.contains(found->second.host);
      ASSERT_TRUE(is_free) << "worker " << id << " has not confirmed that the last one is over";
    }
    const auto asks = [this, &order](WorkerId id) {
      const auto found = processes_.find(id);
      return found != processes_.end() && !killed_.contains(id) && found->second.asks &&
             found->second.was == order.generation - 1;
    };
    if (order.generation > 1) {
      const bool has_state = std::ranges::any_of(begun_[order.generation - 1], asks);
      ASSERT_EQ(has_state, std::ranges::any_of(order.members, asks)) << "what was trained is lost";
    }
    ASSERT_TRUE(trained_.empty() ||
                std::ranges::any_of(members, [&](WorkerId id) { return trained_.contains(id); }))
        << "it would train from nothing";
    if (announced_in_ == order.generation - 1 && changes_then_ == changes_ && !members.empty()) {
      ASSERT_NE(members, begun_[announced_in_]) << "a change that changes nothing was announced";
    }
    begun_[order.generation] = members;
    leaving_.clear();
    for (const WorkerId id : members) {
      const auto found = processes_.find(id);
      if (found == processes_.end()) continue;
      found->second.inside = order.generation;  // from now on at any time
      found->second.asks = false;
      At(Late() + Late(), [this, id, generation = order.generation] { Join(id, generation); });
    }
  }
  void Do(const EndJob& order) {
    ended_ = true;
    const int generation = membership_.generation();
    const bool has_any = std::ranges::any_of(processes_, [&](const auto& one) {
      const auto& [id, process] = one;
      const bool has_state =
          process.inside == generation || (process.asks && process.was == generation);
      return generation > 0 && has_state && !process.stopped && !killed_.contains(id);
    });
    if (has_given_up_) {
      how_it_ended_ = "what was trained is lost";
      EXPECT_NE(order.code, 0);
      EXPECT_TRUE(order.why.ends_with("it is lost")) << order.why;
      return;
    }
    if (has_finished_) {
      how_it_ended_ = order.code == 0 ? "finished" : "finished in part";
      EXPECT_TRUE(processes_.empty()) << order.why;
      EXPECT_EQ(order.code == 0, order.why.empty()) << order.why;
      return;
    }
    EXPECT_NE(order.code, 0);
    if (order.why.starts_with("only ")) {
      how_it_ended_ = "only too few";
      const auto waiting = std::ranges::count_if(
          processes_, [](const auto& one) { return one.second.asks && !one.second.stopped; });
      EXPECT_LT(waiting, limits_.min_ranks) << order.why;
      EXPECT_GE(now_ - std::min(begun_at_, apart_since_), limits_.timeout) << order.why;
    } else if (order.why.starts_with("nobody is left who has trained")) {
      how_it_ended_ = "nobody is left who has trained";
      for (const auto& [id, process] : processes_) {
        EXPECT_TRUE(!trained_.contains(id) || process.stopped || killed_.contains(id)) << id;
      }
    } else if (order.why.starts_with("the workers have changed")) {
      how_it_ended_ = "the reset limit";
      ASSERT_TRUE(limits_.resets) << order.why;
      EXPECT_EQ(generation, *limits_.resets + 1) << order.why;
    } else {
      how_it_ended_ = "all workers have failed";
      EXPECT_TRUE(order.why.starts_with(how_it_ended_) && !has_any) << order.why;
    }
  }

  // All members have to be there; if one is not, the others notice.
  void Join(WorkerId id, int generation) {
    const auto found = processes_.find(id);
    if (found == processes_.end() || found->second.inside != generation) return;
    if (found->second.stopped) return;
    for (const WorkerId other : begun_[generation]) {
      const auto there = processes_.find(other);
      if (there == processes_.end() || there->second.stopped ||
          there->second.inside != generation) {
        return Suspect(id, other);
      }
    }
    found->second.joined = true;
    At(Late(), [this, id, generation] {
      membership_.NoteJoined(id, generation);
      if (processes_.contains(id)) {  // else sirtakirun may know of its end
        membership_.NoteState(id);
        trained_.insert(id);
      }
      const bool have_all = std::ranges::all_of(begun_[generation], [&](WorkerId other) {
        const auto there = processes_.find(other);
        return there != processes_.end() && there->second.inside == generation &&
               there->second.joined;
      });
      if (have_all) apart_since_ = TimePoint::max();
    });
  }

  // A worker keeps its slot, which is its local rank in its first generation.
  void CheckSlots(const BeginGeneration& order) {
    std::map<std::string, std::set<int>> slots;
    std::set<WorkerId> fresh;
    ASSERT_EQ(order.slots.size(), order.members.size());
    for (std::size_t rank = 0; rank < order.members.size(); ++rank) {
      const auto found = processes_.find(order.members[rank]);
      if (found == processes_.end()) continue;  // it has died meanwhile
      Process& process = found->second;
      ASSERT_TRUE(slots[process.host].insert(order.slots[rank]).second) << "two have one slot";
      ASSERT_TRUE(process.slot < 0 || process.slot == order.slots[rank]) << found->first;
      if (process.slot < 0) fresh.insert(found->first);
      process.slot = order.slots[rank];
    }
    const auto alive = std::ranges::count_if(
        order.members, [this](WorkerId id) { return processes_.contains(id); });
    if (alive < std::ssize(order.members)) return;
    for (const WorkerId id : fresh) {
      const Process& process = processes_.at(id);
      const auto& of_host = slots.at(process.host);
      ASSERT_EQ(std::distance(of_host.begin(), of_host.find(process.slot)), process.slot) << id;
    }
  }

  // Nobody has a place on a host that is listed no more, where the other host has enough.
  void CheckLeft() {
    const bool may_change = !limits_.resets || membership_.generation() <= *limits_.resets;
    const bool is_enough = limits_.min_ranks <= kSlots && limits_.max_ranks > 1;
    if (ended_ || ::testing::Test::HasFatalFailure() || !may_change || !is_enough) return;
    Check(1);
    for (const WorkerId id : membership_.Members()) {
      EXPECT_TRUE(listed_.contains(processes_.at(id).host)) << "worker " << id << " has not left";
    }
  }

  // Everybody who may take part does.
  void Check(int hosts) {
    if (ended_ || ::testing::Test::HasFatalFailure()) return;
    ASSERT_FALSE(has_given_up_) << "the job goes on";
    ASSERT_FALSE(has_finished_) << "all programs have ended, and the job has not";
    const std::vector<WorkerId> members = membership_.Members();
    const int most = std::min(limits_.max_ranks, kSlots * hosts);
    ASSERT_GE(static_cast<int>(members.size()), limits_.min_ranks);
    ASSERT_LE(static_cast<int>(members.size()), most);
    // After the last change nobody comes but for one who is lost.
    const bool may_change = !limits_.resets || membership_.generation() <= *limits_.resets;
    if (may_change) {
      EXPECT_EQ(static_cast<int>(members.size()), most);
    }
    for (const WorkerId id : members) {
      const auto found = processes_.find(id);
      ASSERT_NE(found, processes_.end()) << "worker " << id << " is dead";
      EXPECT_EQ(found->second.inside, membership_.generation());
      EXPECT_TRUE(found->second.joined) << "worker " << id;
      EXPECT_FALSE(found->second.stopped);
    }
  }
  static constexpr int kSlots = 2;
  std::mt19937_64 random_;
  ElasticLimits limits_;
  const TimePoint start_ = TimePoint() + std::chrono::hours(1);
  TimePoint now_ = start_;
  Membership membership_;
  std::priority_queue<Event> events_;
  int number_ = 0;
  std::map<WorkerId, Process> processes_;
  std::map<int, std::set<WorkerId>> begun_;
  std::set<std::string> listed_;
  std::set<std::string> gone_;
  std::set<WorkerId> killed_;
  std::set<WorkerId> trained_;
  std::set<WorkerId> leaving_;                // by the change that was announced
  int announced_in_ = 0;                      // this generation; 0: none
  int changes_ = 0;                           // deaths, news of them, lists of hosts
  int changes_then_ = 0;                      // when the change was announced
  TimePoint begun_at_ = start_;               // the last generation, or the job
  TimePoint apart_since_ = TimePoint::max();  // the first one since which none has come together
  bool has_finished_ = false;                 // a program
  bool has_given_up_ = false;
  bool ended_ = false;
  std::string how_it_ended_ = "at rest";
  bool has_stopped_ = false;  // a worker was found to be stopped
};

TEST(MembershipRandomTest, ComesToRestWithEverybodyWhoIsThere) {
  const std::uint64_t first = tests::TestSeed();
  const int count = tests::ScaledCount(500, 10'000);
  std::map<std::string, int> ends;
  for (int i = 0; i < count; ++i) {
    SCOPED_TRACE("SIRTAKI_TEST_SEED=" + std::to_string(first + static_cast<std::uint64_t>(i)));
    World world(first + static_cast<std::uint64_t>(i));
    world.Run();
    if (::testing::Test::HasFailure()) return;
    ++ends[world.how_it_ended()];
    ends["with one that was stopped"] += world.has_stopped() ? 1 : 0;
  }
  if (count < 500) return;
  for (const char* const end :
       {"at rest", "finished", "finished in part", "all workers have failed", "only too few",
        "nobody is left who has trained", "the reset limit", "what was trained is lost",
        "with one that was stopped"}) {
    EXPECT_GT(ends[end], 0) << "no schedule has ended so: " << end;
  }
}

// A change was forgotten while the next generation waited for a worker that was ending, and announced
// again and again.
TEST(MembershipRandomTest, AChangeHoldsWhileAWorkerIsEnding) {
  for (const std::uint64_t seed : {2002068, 3001553, 4007417, 5000749, 7003606}) {
    SCOPED_TRACE("SIRTAKI_TEST_SEED=" + std::to_string(seed));
    World(seed).Run();
  }
}

}  // namespace
}  // namespace sirtaki::launch
