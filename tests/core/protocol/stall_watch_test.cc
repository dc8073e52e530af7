// The watch over stalls by itself, on a clock that the test moves: whom it asks, whom it names, when it
// fails. Whole trees are in the golden scenarios.
#include "core/protocol/stall_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace sirtaki::core {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const Key kW = Key::Named(kWorldSet, "w");

// One rank of three, each on a host of its own; rank 0 is the root, above both others.
class WatchedNode final : public StallWatch::Surroundings {
 public:
  explicit WatchedNode(int rank)
      : rank_(rank),
        node_(Tree({0, 1, 2}, 8).NodeOf(rank)),
        watch({.rank = rank,
               .stall_warning = seconds(60),
               .stall_limit = seconds(600),
               .ping_interval = seconds(2),
               .peer_timeout = seconds(10),
               .activity = [] { return std::string("reads a file"); }},
              node_, 3, *this) {
    sets.emplace(kWorldSet, SetState(kWorldSet, RankRanges::Span(0, 2), node_, rank));
  }

  // This rank has submitted `key`, and waits for the others.
  PendingKey& Wait(const Key& key) {
    SetState& world = sets.at(kWorldSet);
    PendingKey& pending = *world.AddReport(key, kSelf, {}, {}, now);
    pending.Merge(std::make_shared<const Signature>(), {}, RankRanges::Single(rank_));
    watch.NoteWait(pending);
    return pending;
  }
  void Pass(Duration time, const std::vector<RunningOperation>& running = {}) {
    now += time;
    watch.Step(sets, running, now);
  }
  // Live lets the time pass with each step in its time; children answer nothing.
  void Live(Duration time) {
    for (const TimePoint end = now + time; now < end && !faulted();) Pass(seconds(1));
  }
  // The last question.
  void Answer(int child, const RankRanges& missing) {
    const auto number = std::get<QueryMessage>(sent.back().second).number;
    watch.Receive(sets.at(kWorldSet), child, AnswerMessage{kW, number, missing, {}}, now);
  }

  SetState* FindSet(SetNumber set) override { return &sets.at(set); }
  const RankRanges& left() const override { return has_left; }
  void SendNow(int to, MessageBody body) override { sent.emplace_back(to, std::move(body)); }
  void Report(StalledItem item) override { reported.push_back(std::move(item)); }
  void Fail(StatusCode, const std::string& text, const std::string&) override { fault = text; }
  bool faulted() const override { return fault.has_value(); }

 private:
  const int rank_;
  const Tree::Node node_;

 public:
  TimePoint now{seconds(1000)};
  std::map<SetNumber, SetState> sets;
  RankRanges has_left;
  std::vector<std::pair<int, MessageBody>> sent;
  std::vector<StalledItem> reported;
  std::optional<std::string> fault;
  StallWatch watch;
};

TEST(StallWatchTest, TheSeatAsksThoseWhoMissAKeyAndNamesThem) {
  WatchedNode node(0);
  EXPECT_EQ(node.watch.next(), TimePoint::max()) << "nothing waits";
  node.Wait(kW);
  EXPECT_EQ(node.watch.next(), node.now + seconds(60));
  node.Pass(seconds(60));
  ASSERT_THAT(node.sent, SizeIs(2));
  EXPECT_TRUE(std::holds_alternative<QueryMessage>(node.sent[0].second));
  EXPECT_THAT(node.watch.TakeWarnings(), IsEmpty()) << "before they have answered";
  node.Answer(0, RankRanges());
  node.Answer(1, RankRanges{2});
  node.Pass({});
  const std::vector<StallWarning> warnings = node.watch.TakeWarnings();
  ASSERT_THAT(warnings, SizeIs(1));
  EXPECT_EQ(StallText(warnings[0]), "\"w\" has waited 60 s; not submitted by rank 2");
}

TEST(StallWatchTest, ARankThatDoesNotAnswerIsNamedAfterThePingTime) {
  WatchedNode node(0);
  node.Wait(kW);
  node.Pass(seconds(60));
  node.Answer(0, RankRanges{1});
  EXPECT_EQ(node.watch.next(), node.now + seconds(2));
  node.Pass(seconds(2));
  const std::vector<StallWarning> warnings = node.watch.TakeWarnings();
  ASSERT_THAT(warnings, SizeIs(1));
  EXPECT_EQ(warnings[0].silent, RankRanges{2});
}

TEST(StallWatchTest, ADecidedKeyIsForgotten) {
  WatchedNode node(0);
  node.Wait(kW);
  node.sets.at(kWorldSet).keys.Erase(kW);
  node.Pass(seconds(60));
  EXPECT_THAT(node.sent, IsEmpty());
}

TEST(StallWatchTest, WhatWaitsLongerThanTheLimitIsAFaultThatNamesTheLate) {
  WatchedNode node(0);
  node.Wait(kW);
  node.Live(seconds(600));
  node.Answer(0, RankRanges{1});
  node.Answer(1, RankRanges());
  node.Pass({});
  ASSERT_TRUE(node.fault);
  EXPECT_THAT(*node.fault,
              HasSubstr("\"w\" has waited 10 min for rank 1, longer than stall_limit"));
}

TEST(StallWatchTest, ALateReportIsNoJobThatWasStopped) {
  WatchedNode node(0);
  const PendingKey& pending = node.Wait(kW);
  node.Live(seconds(300));
  node.watch.NoteWait(pending);
  node.Live(seconds(305));
  EXPECT_TRUE(node.fault);
}

TEST(StallWatchTest, AJobThatWasStoppedAndGoesOnHasTheLimitAgain) {
  for (const bool in_shutdown : {false, true}) {
    WatchedNode node(0);
    if (in_shutdown) {
      node.has_left = RankRanges{0};
    } else {
      node.Wait(kW);
    }
    node.Live(seconds(100));
    node.Pass(seconds(3600));
    node.Live(seconds(590));
    EXPECT_FALSE(node.fault);
    node.Live(seconds(15));
    EXPECT_TRUE(node.fault);
  }
}

TEST(StallWatchTest, BelowTheSeatItTellsTheSeatOnce) {
  WatchedNode node(1);
  node.Wait(kW);
  node.Pass(seconds(60));
  ASSERT_THAT(node.reported, SizeIs(1));
  EXPECT_EQ(node.reported[0].key, kW);
  EXPECT_EQ(node.reported[0].waited_us, 60'000'000);
  node.Pass(seconds(60));
  EXPECT_THAT(node.reported, SizeIs(1));
}

TEST(StallWatchTest, ARankThatIsAskedSaysWhatItDoes) {
  WatchedNode node(2);
  node.watch.Receive(node.sets.at(kWorldSet), QueryMessage{kW, 7}, node.now);
  EXPECT_TRUE(node.watch.asks());
  node.Pass({});
  ASSERT_THAT(node.sent, SizeIs(1));
  EXPECT_EQ(node.sent[0].first, 0);
  const auto& answer = std::get<AnswerMessage>(node.sent[0].second);
  EXPECT_EQ(answer.number, 7U);
  EXPECT_EQ(answer.missing, RankRanges{2});
  ASSERT_THAT(answer.activities, SizeIs(1));
  EXPECT_EQ(answer.activities[0].text, "reads a file");
  EXPECT_FALSE(node.watch.asks());
}

TEST(StallWatchTest, QuestionsOfASetThatIsGoneAreForgotten) {
  WatchedNode node(0);
  node.watch.Receive(node.sets.at(kWorldSet), QueryMessage{kW, 7}, node.now);
  node.watch.Forget(kWorldSet);
  EXPECT_FALSE(node.watch.asks());
}

TEST(StallWatchTest, WhatRunsForLongIsWarnedOf) {
  WatchedNode node(0);
  const std::vector<RunningOperation> running = {{kWorldSet, "", node.now, kW}};
  node.Pass({}, running);
  node.Pass(seconds(60), running);
  EXPECT_THAT(node.sent, SizeIs(2));
  node.Pass(seconds(2), running);
  const std::vector<StallWarning> warnings = node.watch.TakeWarnings();
  ASSERT_THAT(warnings, SizeIs(1));
  EXPECT_TRUE(warnings[0].agreed);
  EXPECT_EQ(warnings[0].silent, (RankRanges{1, 2}));
}

TEST(StallWatchTest, TheRootWarnsOfAShutdownThatSomeRanksDoNotCall) {
  WatchedNode node(0);
  node.has_left = RankRanges{0};
  node.Pass({});
  node.Pass(seconds(60));
  const std::vector<StallWarning> warnings = node.watch.TakeWarnings();
  ASSERT_THAT(warnings, SizeIs(1));
  EXPECT_EQ(StallBrief(warnings[0]), "rank 0 has waited 60 s in shutdown for ranks 1-2");
}

}  // namespace
}  // namespace sirtaki::core
