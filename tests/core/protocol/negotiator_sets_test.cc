// Process sets that come and go while the world and other sets work, in seeded random schedules:
// numbers and batches agree, what waits in a set that goes is failed on its members, nothing is
// lost, and the ranks' orders have no cycle.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <sstream>

#include "tests/support/negotiation_sim.h"
#include "tests/support/order_cycle.h"
#include "tests/support/test_scale.h"

namespace sirtaki::tests {
namespace {

using core::Key;
using core::RankRanges;
using core::SetNumber;
using core::StatusCode;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

core::Asked AddOf(const RankRanges& members) { return core::AddSet{members}; }
core::Asked RemoveOf(SetNumber set) { return core::RemoveSet{set}; }

// What each rank was told, as texts.
class NegotiatorSetsTest : public ::testing::Test {
 protected:
  explicit NegotiatorSetsTest(SimOptions options = {{0, 0, 1, 1}, 2, {}, {}})
      : sim_(std::move(options)), told_(static_cast<std::size_t>(sim_.size())) {
    sim_.on_batch = [this](int rank, const core::DecidedBatch& batch) {
      auto& told = told_[static_cast<std::size_t>(rank)];
      for (const core::Decided& decided : batch.entries) {
        if (const auto* run = std::get_if<core::DecidedRun>(&decided)) {
          told.push_back("run " + run->key.ToString());
        } else if (const auto* fail = std::get_if<core::DecidedFail>(&decided)) {
          told.push_back("fail " + fail->why.message());
        } else if (const auto* add = std::get_if<core::AddSetEntry>(&decided)) {
          told.push_back("add " + std::to_string(add->set) + ": " + add->members.ToString());
        } else if (const auto* remove = std::get_if<core::RemoveSetEntry>(&decided)) {
          told.push_back("remove " + std::to_string(remove->set));
        } else if (const auto* change = std::get_if<core::LimitsEntry>(&decided)) {
          told.push_back("limits " + std::to_string(change->limits.fusion_bytes));
        } else if (std::holds_alternative<core::AssemblyEntry>(decided)) {
          told.emplace_back("assembled");
        } else {
          told.push_back("joined " + std::to_string(std::get<core::DecidedJoin>(decided).last));
        }
      }
    };
  }

  void Submit(int rank, Key key, core::Asked asked, std::string invalid = {}) {
    core::Request request = RequestOf(std::move(key), std::move(asked));
    request.invalid = std::move(invalid);
    std::vector<core::Request> requests;
    requests.push_back(std::move(request));
    for (const auto& request : requests) sim_.node(rank).Submit(request, sim_.now());
  }

  void AllSubmit(const std::string& name, const core::Asked& asked) {
    for (int rank = 0; rank < sim_.size(); ++rank) {
      Submit(rank, Key::Named(0, name), asked);
    }
    sim_.Settle();
  }

  void ExpectNoFault() {
    for (int rank = 0; rank < sim_.size(); ++rank) {
      EXPECT_FALSE(sim_.node(rank).faulted())
          << (sim_.node(rank).faulted() ? sim_.node(rank).cause().text : "");
    }
  }

  std::vector<std::string>& told(int rank) { return told_[static_cast<std::size_t>(rank)]; }

  NegotiationSim sim_;
  std::vector<std::vector<std::string>> told_;
};

TEST_F(NegotiatorSetsTest, ASetIsAddedUsedAndRemoved) {
  AllSubmit("c1", AddOf({1, 3}));
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(told(rank), ElementsAre("add 1: 1, 3"));
    EXPECT_EQ(sim_.node(rank).IsMember(1), rank == 1 || rank == 3);
  }
  Submit(1, Key::Named(1, "w"), AllReduceOf({2}));
  Submit(3, Key::Named(1, "w"), AllReduceOf({2}));
  sim_.Settle();
  AllSubmit("c2", RemoveOf(1));
  EXPECT_THAT(told(1), ElementsAre("add 1: 1, 3", "run \"w\" of process set 1", "remove 1"));
  EXPECT_THAT(told(2), ElementsAre("add 1: 1, 3", "remove 1"));
  EXPECT_FALSE(sim_.node(1).IsMember(1));
  AllSubmit("c3", AddOf({0}));
  EXPECT_EQ(told(2).back(), "add 2: 0") << "numbers are not used again";
  ExpectNoFault();
}

TEST_F(NegotiatorSetsTest, WhatWaitsInASetThatGoesIsFailed) {
  AllSubmit("c1", AddOf({1, 2, 3}));
  Submit(1, Key::Named(1, "w"), AllReduceOf({2}));
  sim_.node(2).Join(1, sim_.now());
  sim_.Settle();
  AllSubmit("c2", RemoveOf(1));
  EXPECT_THAT(
      told(1),
      ElementsAre("add 1: 1-3", "fail \"w\" of process set 1: the set was removed while it waited",
                  "remove 1"));
  EXPECT_THAT(
      told(2),
      ElementsAre("add 1: 1-3", "fail join of process set 1: the set was removed while it waited",
                  "remove 1"));
  EXPECT_THAT(told(3), ElementsAre("add 1: 1-3", "remove 1"));
  ExpectNoFault();
  for (int rank = 0; rank < 4; ++rank) EXPECT_TRUE(sim_.node(rank).Quiescent());
}

// Whichever node is the seat of the set, and though the root hears of both in one round.
TEST_F(NegotiatorSetsTest, WhatAllMembersHaveSubmittedRunsBeforeTheirSetGoes) {
  AllSubmit("add", AddOf({0, 1}));
  AllSubmit("add too", AddOf({2, 3}));
  for (const int rank : {3, 2, 0, 1}) {  // rank 1 completes everything by one report
    told(rank).clear();
    Submit(rank, Key::Named(rank < 2 ? 1 : 2, "w"), AllReduceOf({2}));
    Submit(rank, Key::Named(0, "c1"), RemoveOf(1));
    Submit(rank, Key::Named(0, "c2"), RemoveOf(2));
    sim_.Settle();
  }
  for (const int rank : {0, 1, 2, 3}) {
    const std::string runs = "run \"w\" of process set " + std::to_string(rank < 2 ? 1 : 2);
    EXPECT_THAT(told(rank), UnorderedElementsAre(runs, "remove 1", "remove 2")) << rank;
    EXPECT_TRUE(sim_.node(rank).Quiescent()) << rank;
  }
  ExpectNoFault();
}

TEST_F(NegotiatorSetsTest, ChangesThatMakeNoSenseAreRefusedOnAllRanks) {
  AllSubmit("c1", RemoveOf(7));
  EXPECT_THAT(told(3).back(), HasSubstr("there is no process set 7 to be removed"));
  AllSubmit("c2", RemoveOf(0));
  EXPECT_THAT(told(3).back(), HasSubstr("there is no process set 0 to be removed"));
  AllSubmit("c3", AddOf({1, 9}));
  EXPECT_THAT(told(3).back(), HasSubstr("ranks 1, 9 are not all among 0-3"));
  AllSubmit("c4", AddOf({}));
  EXPECT_THAT(told(3).back(), HasSubstr("fail"));
  for (int rank = 0; rank < 4; ++rank) {
    Submit(rank, Key::Named(0, "c5"), AddOf(rank == 2 ? RankRanges{0, 1} : RankRanges{0, 2}));
  }
  sim_.Settle();
  EXPECT_THAT(told(0).back(), HasSubstr("ranks 0, 2 on ranks 0-1, 3, ranks 0-1 on rank 2"));
  sim_.node(1).Join(0, sim_.now());
  for (const int rank : {0, 2, 3}) Submit(rank, Key::Named(0, "c6"), AddOf({0}));
  sim_.Settle();
  EXPECT_THAT(told(0).back(), HasSubstr("rank 1 has joined"));
  ExpectNoFault();
}

TEST_F(NegotiatorSetsTest, LimitsChangeForAllInABatchOfTheirOwn) {
  std::vector<std::size_t> entries;
  const auto tell = sim_.on_batch;
  sim_.on_batch = [&](int rank, const core::DecidedBatch& batch) {
    if (rank == 1) entries.push_back(batch.entries.size());
    tell(rank, batch);
  };
  sim_.node(3).Join(0, sim_.now());
  sim_.Settle();
  for (const int rank : {1, 2, 0}) {  // rank 0 completes everything at once
    Submit(rank, Key::Named(0, "a"), AllReduceOf({2}));
    Submit(rank, Key::Named(0, "l"), core::Limits{.fusion_bytes = 7});
    Submit(rank, Key::Named(0, "b"), AllReduceOf({2}));
    sim_.Settle();
  }
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(told(rank), UnorderedElementsAre("run \"a\"", "limits 7", "run \"b\"")) << rank;
    EXPECT_EQ(told(rank), told(0));
  }
  EXPECT_THAT(entries, ElementsAre(1, 1, 1));
  EXPECT_TRUE(sim_.node(0).KnownIds(0).size() == 2) << "limits have no ids";
  ExpectNoFault();
}

TEST_F(NegotiatorSetsTest, LimitsThatDifferAreToldByName) {
  for (int rank = 0; rank < 4; ++rank) {
    Submit(rank, Key::Named(0, "l"), core::Limits{.small_bytes = rank == 2 ? 5 : 6});
  }
  sim_.Settle();
  EXPECT_THAT(told(1),
              ElementsAre(AllOf(HasSubstr("fail change of limits \"l\": fusion_bytes"),
                                HasSubstr("small_bytes 6 "), HasSubstr("on ranks 0-1, 3, "),
                                HasSubstr("small_bytes 5 "), HasSubstr("on rank 2"))));
  ExpectNoFault();
}

// Beside an argument that is wrong on another rank as well.
TEST_F(NegotiatorSetsTest, ARefusalIsTellable) {
  std::vector<StatusCode> codes;
  sim_.on_batch = [&codes](int, const core::DecidedBatch& batch) {
    for (const core::Decided& decided : batch.entries) {
      codes.push_back(std::get<core::DecidedFail>(decided).why.code());
    }
  };
  for (const bool refuses : {false, true}) {
    const std::string name = refuses ? "refused" : "wrong";
    Submit(0, Key::Named(0, name), AllReduceOf({2}));
    Submit(1, Key::Named(0, name), AllReduceOf({2}), "its backward() has thrown");
    if (refuses) {
      Submit(2, Key::Named(0, name), core::Refusal{}, "its backward() has thrown");
    } else {
      Submit(2, Key::Named(0, name), AllReduceOf({2}));
    }
    Submit(3, Key::Named(0, name), AllReduceOf({2}), "of no type");
    sim_.Settle();
    EXPECT_THAT(codes, testing::AllOf(testing::SizeIs(4),
                                      testing::Each(refuses ? StatusCode::kRefused
                                                            : StatusCode::kInvalidArgument)));
    codes.clear();
  }
  ExpectNoFault();
}

TEST_F(NegotiatorSetsTest, AnAssemblyIsOfAllMembersOrOfNone) {
  AllSubmit("together", core::Assembly{});
  EXPECT_THAT(told(3), ElementsAre("assembled"));
  AllSubmit("add", AddOf({0, 2}));
  sim_.node(2).Join(1, sim_.now());
  Submit(0, Key::Named(1, "here"), core::Assembly{});
  sim_.Settle();
  EXPECT_THAT(told(0).back(), HasSubstr("rank 2 has joined, and does not take part"));
  ExpectNoFault();
}

TEST_F(NegotiatorSetsTest, TwoRemovalsOfOneSetInOneStep) {
  AllSubmit("c1", AddOf({1}));
  for (int rank = 0; rank < 4; ++rank) {
    Submit(rank, Key::Named(0, "c2"), RemoveOf(1));
    Submit(rank, Key::Named(0, "c3"), RemoveOf(1));
  }
  sim_.Settle();
  ASSERT_EQ(told(1).size(), 3U);
  EXPECT_THAT(told(1)[1] + told(1)[2], HasSubstr("remove 1"));
  EXPECT_THAT(told(1)[1] + told(1)[2], HasSubstr("there is no process set 1"));
  ExpectNoFault();
}

TEST_F(NegotiatorSetsTest, ARankThatWaitsInJoinIsWarnedOfAndNamesTheLate) {
  std::vector<std::string> warnings;
  sim_.on_warning = [&](int, const core::StallWarning& w) { warnings.push_back(StallText(w)); };
  for (const int rank : {0, 1, 3}) sim_.node(rank).Join(0, sim_.now());
  sim_.Run(std::chrono::seconds(70), std::chrono::milliseconds(500));
  ASSERT_FALSE(warnings.empty());
  EXPECT_THAT(warnings[0], HasSubstr("join has waited"));
  EXPECT_THAT(warnings[0], HasSubstr("not submitted by rank 2"));
  sim_.node(2).Join(0, sim_.now());
  sim_.Settle();
  EXPECT_THAT(told(0), ElementsAre("joined 2"));
  for (int rank = 0; rank < 4; ++rank) EXPECT_TRUE(sim_.node(rank).Quiescent());
  ExpectNoFault();
}

TEST_F(NegotiatorSetsTest, ACallWhoseTimeIsOverNamesWhoMissesIt) {
  for (const int rank : {0, 1, 3}) Submit(rank, Key::Named(0, "w"), AllReduceOf({1}));
  sim_.Settle();
  EXPECT_GT(sim_.node(3).TimeOut(Key::Named(0, "w"), std::chrono::seconds(5), sim_.now()),
            core::Duration::zero());
  sim_.Run(std::chrono::seconds(3), std::chrono::milliseconds(50));
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_TRUE(sim_.node(rank).faulted());
    EXPECT_EQ(sim_.node(rank).cause().code, StatusCode::kTimedOut);
    EXPECT_THAT(sim_.node(rank).cause().text,
                HasSubstr("\"w\" did not finish within its time-out of 5 s; not submitted by rank "
                          "2; rank 2: activity of rank 2"));
  }
}

TEST_F(NegotiatorSetsTest, AJoinWhoseTimeIsOverNamesWhoMissesIt) {
  for (const int rank : {0, 1, 3}) sim_.node(rank).Join(0, sim_.now());
  sim_.Settle();
  EXPECT_GT(sim_.node(3).TimeOut(Key::Join(0), std::chrono::seconds(5), sim_.now()),
            core::Duration::zero());
  sim_.Run(std::chrono::seconds(3), std::chrono::milliseconds(50));
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_TRUE(sim_.node(rank).faulted());
    EXPECT_THAT(
        sim_.node(rank).cause().text,
        HasSubstr("join did not finish within its time-out of 5 s; not submitted by rank 2"));
  }
}

TEST_F(NegotiatorSetsTest, ARankIsMissedThatStopsWhileItRunsWhatASetThatGoesHasLeft) {
  AllSubmit("c1", AddOf({1, 2, 3}));
  for (const int rank : {1, 2, 3}) {
    sim_.local(rank).running = {{1, "", sim_.now(), Key::Named(1, "w")}};
  }
  AllSubmit("c2", RemoveOf(1));
  EXPECT_THAT(told(1), ElementsAre("add 1: 1-3", "remove 1"));
  sim_.Stop(2);
  sim_.Run(std::chrono::seconds(30), std::chrono::milliseconds(50));
  for (const int rank : {0, 1, 3}) {
    ASSERT_TRUE(sim_.node(rank).faulted());
    EXPECT_EQ(sim_.node(rank).cause().code, StatusCode::kPeerLost);
  }
}

// At the seat, where the time that is left is not sent but kept.
TEST_F(NegotiatorSetsTest, ACallThatIsLateBeforeItIsSubmittedNamesWhoMissesItToo) {
  for (const int rank : {0, 1, 3}) Submit(rank, Key::Named(0, "w"), AllReduceOf({1}));
  sim_.Settle();
  sim_.node(0).TimeOut(Key::Named(0, "w"), core::Duration(0), sim_.now());
  sim_.Run(std::chrono::seconds(3), std::chrono::milliseconds(50));
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_TRUE(sim_.node(rank).faulted());
    EXPECT_THAT(sim_.node(rank).cause().text, HasSubstr("not submitted by rank 2"));
  }
}

TEST_F(NegotiatorSetsTest, AWarningOfACallWithoutANameSaysWhatItIs) {
  std::vector<core::StallWarning> warnings;
  sim_.on_warning = [&](int, const core::StallWarning& warning) { warnings.push_back(warning); };
  for (const int rank : {0, 1, 3}) Submit(rank, Key::Unnamed(0, 0), AllReduceOf({1}));
  sim_.Run(std::chrono::seconds(62), std::chrono::milliseconds(50));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(core::StallText(warnings[0]), HasSubstr("all-reduce: unnamed call #0 has waited 60"));
  EXPECT_EQ(core::StallBrief(warnings[0]), "waits for rank 2: all-reduce: unnamed call #0");
}

// Ranks 0 and 3 run what the others have finished.
TEST_F(NegotiatorSetsTest, WhatRunsForLongIsWarnedOfOnceByItsSeatAndAfterAsLongAgain) {
  std::vector<std::pair<int, std::string>> warnings;
  sim_.on_warning = [&](int rank, const core::StallWarning& warning) {
    warnings.emplace_back(rank, core::StallText(warning));
  };
  for (const int rank : {0, 3}) {
    sim_.local(rank).running = {{0, "", sim_.now(), Key::Named(0, "w")}};
    sim_.local(rank).drained = false;
  }
  sim_.Run(std::chrono::seconds(59), std::chrono::milliseconds(50));
  EXPECT_TRUE(warnings.empty());
  sim_.Run(std::chrono::seconds(5), std::chrono::milliseconds(50));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_EQ(warnings[0].first, 0);
  EXPECT_THAT(warnings[0].second, HasSubstr("\"w\" is agreed on and has not ended for 60"));
  for (int rank = 0; rank < 4; ++rank) {
    const std::string number = std::to_string(rank);
    EXPECT_THAT(warnings[0].second, HasSubstr("; rank " + number + ": activity of rank " + number));
  }
  sim_.Run(std::chrono::seconds(50), std::chrono::milliseconds(50));
  EXPECT_EQ(warnings.size(), 1u);
  sim_.Run(std::chrono::seconds(10), std::chrono::milliseconds(50));
  EXPECT_EQ(warnings.size(), 2u);
  sim_.Run(std::chrono::seconds(100), std::chrono::milliseconds(50));
  EXPECT_EQ(warnings.size(), 2u);
  sim_.Run(std::chrono::seconds(30), std::chrono::milliseconds(50));
  EXPECT_EQ(warnings.size(), 3u);
  EXPECT_FALSE(sim_.node(0).faulted());
}

// Each in its turn: a backlog is no stall.
TEST_F(NegotiatorSetsTest, WhatIsQueuedBehindOthersIsNotLateBeforeItsTurn) {
  int warnings = 0;
  sim_.on_warning = [&](int, const core::StallWarning&) { ++warnings; };
  const core::TimePoint start = sim_.now();
  for (int i = 0; i < 60; ++i) {  // 50 minutes of them
    sim_.local(0).running = {{0, "", start, Key::Named(0, "w" + std::to_string(i))}};
    sim_.Run(std::chrono::seconds(50), std::chrono::milliseconds(500));
  }
  EXPECT_EQ(warnings, 0);
  EXPECT_FALSE(sim_.node(0).faulted());
}

TEST_F(NegotiatorSetsTest, WhatRunsForLongerThanTheLimitIsTheGroupsFault) {
  sim_.local(3).running = {{0, "", sim_.now(), Key::Named(0, "w")}};
  sim_.local(3).drained = false;
  sim_.Run(std::chrono::seconds(3), std::chrono::milliseconds(50));
  sim_.Advance(std::chrono::minutes(31));
  sim_.Settle();
  EXPECT_FALSE(sim_.node(3).faulted());  // the job may have been stopped, and goes on
  sim_.Run(std::chrono::seconds(11), std::chrono::milliseconds(50));
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_TRUE(sim_.node(rank).faulted());
    EXPECT_THAT(sim_.node(rank).cause().text,
                AllOf(HasSubstr("\"w\" is agreed on and has not ended for 31"),
                      HasSubstr("longer than stall_limit (30 min); rank 3: activity of rank 3")));
  }
}

// A message is waited for as long as its peer lives.
TEST_F(NegotiatorSetsTest, WhatHasNoKeyMayRunForEver) {
  sim_.local(3).running = {{0, "", sim_.now(), {}}};
  sim_.Advance(std::chrono::minutes(31));
  sim_.Settle();
  EXPECT_FALSE(sim_.node(3).faulted());
}

// The decision is on its way down while the report of the delay goes up.
TEST_F(NegotiatorSetsTest, AReportOfADelayThatCrossesTheDecisionHarmsNobody) {
  for (const int rank : {1, 3}) Submit(rank, Key::Unnamed(0, 0), AllReduceOf({1}));
  for (int rank : {1, 3, 2}) sim_.Pump(rank);
  for (const int rank : {0, 2}) Submit(rank, Key::Unnamed(0, 0), AllReduceOf({1}));
  // Everything up to the root, which decides; the way down waits.
  for (bool any = true; any;) {
    any = false;
    for (const NegotiationSim::Link& link : sim_.BusyLinks()) {
      if (link.second > link.first) continue;
      sim_.Deliver(link);
      any = true;
    }
    for (int rank : {3, 2}) sim_.Pump(rank);
  }
  sim_.Pump(0);
  sim_.node(1).TimeOut(Key::Unnamed(0, 0), std::chrono::seconds(5), sim_.now());
  sim_.Run(std::chrono::seconds(5), std::chrono::milliseconds(50));
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(told(rank), ElementsAre("run unnamed call #0"));
    EXPECT_TRUE(sim_.node(rank).Quiescent()) << rank;
  }
  ExpectNoFault();
}

// ---- random schedules ----

class SetSchedule {
 public:
  explicit SetSchedule(std::uint64_t seed) : random_(seed), sim_(Options()) {
    ranks_.resize(static_cast<std::size_t>(sim_.size()));
    for (int i = 0, count = 2 + Below(8); i < count; ++i) MakeChange();
    sim_.on_batch = [this](int rank, const core::DecidedBatch& batch) { Executed(rank, batch); };
  }

  std::string Run() {
    for (acts_ = 0; acts_ < 20000 && !Done(); ++acts_) Act();
    sim_.Settle();
    for (int r = 0; r < sim_.size(); ++r) {
      const core::Negotiator& node = sim_.node(r);
      if (node.faulted()) Problem() << "rank " << r << ": " << node.cause().text;
      if (At(r).changes_done != changes_.size()) Problem() << "rank " << r << " misses a change";
    }
    leaving_ = true;
    for (int r = 0; r < sim_.size(); ++r) sim_.node(r).Leave("the end", sim_.now());
    sim_.Settle();
    for (int r = 0; r < sim_.size(); ++r) {
      if (!At(r).in_flight.empty()) Problem() << "rank " << r << ": never done";
      if (!sim_.node(r).closed() || !sim_.node(r).Quiescent()) {
        Problem() << "rank " << r << " keeps state";
      }
    }
    CheckOrders();
    return problems_.str();
  }

 private:
  struct Rank {
    std::size_t changes_done = 0;
    bool change_in_flight = false;
    std::set<std::string> in_flight;
    std::map<SetNumber, int> used;  // names of the set that were submitted
    std::vector<std::string> order;
  };

  int Below(int n) { return static_cast<int>(random_() % static_cast<std::uint64_t>(n)); }
  Rank& At(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  std::ostream& Problem() { return problems_ << "\n  "; }

  SimOptions Options() {
    SimOptions options;
    const int size = 2 + Below(7);
    options.host_of_rank.clear();
    for (int r = 0; r < size; ++r) options.host_of_rank.push_back(Below(1 + size / 2));
    options.arity = 1 + Below(3);
    options.negotiator.id_capacity = static_cast<std::size_t>(1 + Below(6));
    options.negotiator.stall_warning = std::chrono::milliseconds(20);
    options.negotiator.stall_limit = std::chrono::hours(10);
    options.negotiator.ping_interval = std::chrono::milliseconds(20);
    options.negotiator.peer_timeout = std::chrono::hours(10);
    return options;
  }

  void MakeChange() {
    if (!live_.empty() && Below(100) < 40) {
      const auto gone = std::next(live_.begin(), Below(static_cast<int>(live_.size())));
      changes_.push_back(RemoveOf(*gone));
      live_.erase(gone);
      return;
    }
    if (Below(100) < 30) {
      changes_.push_back(core::Limits{.fusion_bytes = next_limits_++});
      return;
    }
    RankRanges members;
    while (members.empty()) {
      for (int r = 0; r < sim_.size(); ++r) {
        if (Below(2) == 0) members.Add(r);
      }
    }
    changes_.push_back(AddOf(members));
    live_.insert(next_set_++);
  }

  bool Done() {
    for (int r = 0; r < sim_.size(); ++r) {
      if (At(r).changes_done != changes_.size()) return false;
    }
    return acts_ > 300;
  }

  void Act() {
    sim_.Advance(std::chrono::microseconds(Below(150)));
    const int what = Below(10);
    if (what < 5) {
      const auto busy = sim_.BusyLinks();
      if (!busy.empty()) {
        return sim_.Deliver(busy[static_cast<std::size_t>(Below(static_cast<int>(busy.size())))]);
      }
    }
    const int rank = Below(sim_.size());
    if (what < 8) Submit(rank);
    if (Below(3) > 0) sim_.Pump(rank);
  }

  void Submit(int rank) {
    Rank& r = At(rank);
    core::Request request;
    if (!r.change_in_flight && r.changes_done < changes_.size() && Below(4) == 0) {
      r.change_in_flight = true;
      request = RequestOf(Key::Named(0, "change " + std::to_string(r.changes_done)),
                          changes_[r.changes_done]);
    } else {
      // The uses of a set are the same everywhere: name i, i = 0, 1, …
      std::vector<SetNumber> sets;
      for (SetNumber set = 0; set < next_set_; ++set) {
        if (sim_.node(rank).IsMember(set) && r.used[set] < 12) sets.push_back(set);
      }
      if (sets.empty()) return;
      const SetNumber set = sets[static_cast<std::size_t>(Below(static_cast<int>(sets.size())))];
      request = RequestOf(Key::Named(set, "t" + std::to_string(r.used[set]++)), AllReduceOf({3}));
    }
    r.in_flight.insert(request.key.ToString());
    std::vector<core::Request> requests;
    requests.push_back(std::move(request));
    for (const auto& request : requests) sim_.node(rank).Submit(request, sim_.now());
  }

  void Executed(int rank, const core::DecidedBatch& batch) {
    Rank& r = At(rank);
    for (std::size_t i = 0; i < batch.entries.size(); ++i) {
      const core::Decided& decided = batch.entries[i];
      if (const auto* run = std::get_if<core::DecidedRun>(&decided)) {
        Note(rank, batch, i, "run " + run->key.ToString());
        Complete(rank, run->key);
      } else if (const auto* fail = std::get_if<core::DecidedFail>(&decided)) {
        // In the end a member that never submitted it is told, too: it has left.
        if (!leaving_ || At(rank).in_flight.contains(fail->key.ToString())) {
          Complete(rank, fail->key);
        }
      } else if (const auto* added = std::get_if<core::AddSetEntry>(&decided)) {
        Note(rank, batch, i, "add " + std::to_string(added->set));
        Complete(rank, added->key);
        FinishChange(r);
      } else if (const auto* limits = std::get_if<core::LimitsEntry>(&decided)) {
        Note(rank, batch, i, "limits " + std::to_string(limits->limits.fusion_bytes));
        Complete(rank, limits->key);
        FinishChange(r);
      } else {
        const auto& removed = std::get<core::RemoveSetEntry>(decided);
        Note(rank, batch, i, "remove " + std::to_string(removed.set));
        Complete(rank, removed.key);
        FinishChange(r);
      }
    }
  }

  // What the members of a set see at one place of its stream is the same for all of them.
  void Note(int rank, const core::DecidedBatch& batch, std::size_t i, const std::string& what) {
    At(rank).order.push_back(std::to_string(batch.set) + " " + what);
    const auto place = std::to_string(batch.set) + "." + std::to_string(batch.number) + "." +
                       (what.starts_with("run") ? std::to_string(i) : std::string("change"));
    const auto [known, first] = seen_.try_emplace(place, what);
    if (!first && known->second != what) {
      Problem() << "rank " << rank << " sees " << what << " where another saw " << known->second;
    }
  }

  void FinishChange(Rank& r) {
    r.change_in_flight = false;
    ++r.changes_done;
  }

  void Complete(int rank, const Key& key) {
    if (At(rank).in_flight.erase(key.ToString()) == 0) {
      Problem() << "rank " << rank << " is told of " << key.ToString() << ", not submitted";
    }
  }

  void CheckOrders() {
    std::vector<std::vector<std::string>> orders;
    for (const Rank& r : ranks_) orders.push_back(r.order);
    const std::string cycle = tests::CycleOf(orders);
    if (!cycle.empty()) Problem() << cycle;
  }

  std::mt19937_64 random_;
  NegotiationSim sim_;
  std::vector<core::Asked> changes_;
  std::int64_t next_limits_ = 0;
  std::set<SetNumber> live_;
  SetNumber next_set_ = 1;
  std::vector<Rank> ranks_;
  std::map<std::string, std::string> seen_;
  int acts_ = 0;
  bool leaving_ = false;
  std::ostringstream problems_;
};

TEST(NegotiatorSetsRandomTest, SetsComeAndGoInRandomSchedules) {
  const std::uint64_t first = TestSeed();
  const int count = ScaledCount(500, 10000);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
    const std::string problems = SetSchedule(seed).Run();
    ASSERT_EQ(problems, "") << "again with SIRTAKI_TEST_SEED=" << seed;
  }
}

}  // namespace
}  // namespace sirtaki::tests
