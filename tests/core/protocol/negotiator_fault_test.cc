#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/protocol/negotiator.h"
#include "tests/support/negotiation_sim.h"

namespace sirtaki::core {
namespace {

TEST(NegotiatorFaultTest, OfTwoFaultsEveryRankEndsWithTheEarliest) {
  const Tree tree({0, 0, 0}, 8);  // 1 and 2 are children of 0
  std::int64_t clock = 0;
  std::vector<std::unique_ptr<Negotiator>> nodes;
  for (int rank = 0; rank < 3; ++rank) {
    NegotiatorOptions options;
    options.rank = rank;
    options.sets[kWorldSet] = RankRanges::Span(0, 2);
    options.unix_us = [&clock] { return clock; };
    nodes.push_back(std::make_unique<Negotiator>(std::move(options), tree));
  }
  const auto node = [&](int rank) -> Negotiator& { return *nodes[static_cast<std::size_t>(rank)]; };
  clock = 1;
  node(1).RaiseFault(StatusCode::kAborted, "early", "");
  clock = 2;
  node(2).RaiseFault(StatusCode::kAborted, "late", "");
  // The later one is heard by the root first.
  for (const int rank : {2, 0, 1, 0, 2, 0, 1, 2}) {
    for (Outgoing& message : node(rank).TakeReady().outgoing) {
      node(message.to).Receive(rank, std::move(message.body), {});
    }
  }
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(node(rank).cause().text, "early") << "rank " << rank;
    EXPECT_TRUE(node(rank).TakeReady().outgoing.empty()) << "rank " << rank << " goes on telling";
  }
}

// The time of a call ends while its decision is on the way: the next use of the name is not late.
TEST(NegotiatorFaultTest, ATimeOutThatCrossesItsDecisionIsForgotten) {
  for (const bool used_again : {false, true}) {
    tests::SimOptions options;
    options.host_of_rank = {0, 1, 2};
    tests::NegotiationSim sim(std::move(options));
    int questions = 0;
    int batches = 0;
    sim.on_send = [&](int, int, const MessageBody& body) {
      questions += std::holds_alternative<QueryMessage>(body) ? 1 : 0;
    };
    sim.on_batch = [&](int, const DecidedBatch&) { ++batches; };
    const Key w = Key::Named(kWorldSet, "w");
    const auto submit = [&](int rank) {
      sim.node(rank).Submit({tests::RequestOf(w, tests::AllReduceOf({1}))}, sim.now());
      sim.Pump(rank);
    };
    for (const int rank : {0, 1, 2}) submit(rank);
    for (const int rank : {1, 2}) sim.Deliver({rank, 0});
    ASSERT_EQ(batches, 1) << "only the seat knows that it is decided";
    EXPECT_GT(sim.node(1).TimeOut(w, std::chrono::seconds(1), sim.now()), Duration::zero());
    sim.Pump(1);
    sim.Deliver({0, 2});
    if (used_again) {
      submit(2);
      sim.Deliver({2, 0});
    }
    sim.Deliver({1, 0});
    sim.Run(std::chrono::seconds(5), std::chrono::milliseconds(50));
    EXPECT_EQ(questions, 0);
    for (const int rank : {0, 1}) submit(rank);
    if (!used_again) submit(2);
    sim.Settle();
    EXPECT_EQ(batches, 6);
    for (const int rank : {0, 1, 2}) EXPECT_FALSE(sim.node(rank).faulted());
  }
}

// By the tree rank 3 would learn it from rank 2, which may have gone by then.
TEST(NegotiatorFaultTest, WhereAllAreReachedEachLearnsItFromTheRankWhereItBegan) {
  const Tree tree({0, 1, 2, 3}, 1);  // a chain
  NegotiatorOptions options;
  options.rank = 0;
  options.sets[kWorldSet] = RankRanges::Span(0, 3);
  options.reaches_all = true;
  Negotiator first(options, tree);
  options.rank = 3;
  Negotiator last(options, tree);
  first.RaiseFault(StatusCode::kAborted, "the loss is NaN", "");
  std::vector<int> told;
  for (Outgoing& message : first.TakeReady().outgoing) {
    told.push_back(message.to);
    if (message.to == 3) last.Receive(0, std::move(message.body), {});
  }
  EXPECT_EQ(told, (std::vector{1, 2, 3}));
  ASSERT_TRUE(last.faulted());
  EXPECT_EQ(last.cause().text, "the loss is NaN");
  // It goes on by the tree all the same: to those that do not listen to all.
  const std::vector<Outgoing> on = last.TakeReady().outgoing;
  ASSERT_EQ(on.size(), 1U);
  EXPECT_EQ(on[0].to, 2);
}

// A node under test, and messages that no correct neighbour sends. Rank 1 of the chain 0 - 1 - 2.
class NegotiatorHostileTest : public ::testing::Test {
 protected:
  NegotiatorHostileTest() : node_(Options(), Tree({0, 1, 2}, 1)) {}

  static NegotiatorOptions Options() {
    NegotiatorOptions options;
    options.rank = 1;
    options.sets[kWorldSet] = RankRanges::Span(0, 2);
    options.sets[5] = RankRanges::Span(0, 1);
    return options;
  }
  static Key W() { return Key::Named(kWorldSet, "w"); }
  static ReadyItem ReadyW() {
    ReadyItem ready;
    ready.key = W();
    ready.variants.push_back({std::make_shared<Signature>(), {}, RankRanges::Single(2)});
    return ready;
  }
  void Stream(SetNumber set, Entry entry) {
    StreamMessage stream;
    stream.batches.push_back({set, 1, {std::move(entry)}});
    node_.Receive(0, std::move(stream), {});
  }
  void Report(std::vector<ReportItem> items) {
    node_.Receive(2, ReportMessage{0, std::move(items)}, {});
  }
  std::string Cause() const { return node_.faulted() ? node_.cause().text : "no fault"; }

  Negotiator node_;
};

TEST_F(NegotiatorHostileTest, ADecisionOfAKeyThatThisNodeHasNotReportedYet) {
  std::vector<Request> requests(1);
  requests[0].key = W();
  requests[0].asked = std::make_shared<Signature>();
  for (const auto& request : requests) node_.Submit(request, {});
  Report({ReadyW()});  // complete, and to be told in the next message
  Stream(kWorldSet, FailEntry{W(), StatusCode::kMismatch, "no"});
  static_cast<void>(node_.TakeReady().outgoing);
  EXPECT_EQ(Cause(), "rank 0 sent a decision of \"w\", which is not reported from here");
}

TEST_F(NegotiatorHostileTest, ASetThatComesOrGoesByAnEntryOfAnotherSetThanTheWorld) {
  Stream(5, AddSetEntry{Key::Named(5, "c"), 6, RankRanges::Single(1)});
  EXPECT_EQ(Cause(), "rank 0 sent the addition of set 6 in a batch of set 5");
}

TEST_F(NegotiatorHostileTest, ASetThatGoesByAnEntryOfItsOwn) {
  Stream(5, RemoveSetEntry{Key::Named(5, "c"), 5});
  EXPECT_EQ(Cause(), "rank 0 sent the removal of set 5 in a batch of set 5");
}

TEST_F(NegotiatorHostileTest, LimitsThatAreNotTheWorlds) {
  Stream(5, LimitsEntry{Key::Named(5, "l"), {}});
  EXPECT_EQ(Cause(), "rank 0 sent limits in a batch of set 5");
}

TEST_F(NegotiatorHostileTest, TheRemovalOfTheWorld) {
  Stream(kWorldSet, RemoveSetEntry{Key::Named(kWorldSet, "c"), kWorldSet});
  EXPECT_EQ(Cause(), "rank 0 sent the removal of set 0 in a batch of set 0");
}

// Nothing of the report is judged by it, not even what stands before it.
TEST_F(NegotiatorHostileTest, TheDepartureOfARankThatIsElsewhere) {
  ReadyItem unknown;
  unknown.id = 7;
  Report({unknown, LeftItem{RankRanges::Single(0), "bye"}});
  EXPECT_EQ(Cause(), "rank 2 sent the departure of a rank that is not below it");
}

// A node that is asked has heard of all that was decided before the question.
TEST_F(NegotiatorHostileTest, AQuestionTravelsBehindTheDecisionsBeforeIt) {
  Stream(kWorldSet, EvictEntry{{}});
  node_.Receive(0, QueryMessage{W(), 1}, {});
  std::vector<std::string> to_child;
  for (const Outgoing& message : node_.TakeReady().outgoing) {
    if (message.to != 2) continue;
    to_child.emplace_back(std::holds_alternative<StreamMessage>(message.body)  ? "stream"
                          : std::holds_alternative<QueryMessage>(message.body) ? "query"
                                                                               : "another");
  }
  EXPECT_EQ(to_child, (std::vector<std::string>{"stream", "query"})) << Cause();
}

}  // namespace
}  // namespace sirtaki::core
