// Ranks that wait for each other (18).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tests/support/negotiation_sim.h"

namespace sirtaki::core {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using testing::HasSubstr;
using testing::Not;
using tests::AllReduceOf;
using tests::NegotiationSim;
using tests::RequestOf;
using tests::SimOptions;

class CircleTest : public ::testing::Test {
 protected:
  // A chain of four hosts, so that what rank 3 says passes two others.
  CircleTest() : sim_(Options()) {
    sim_.on_send = [this](int, int, const MessageBody& body) {
      questions_ += std::holds_alternative<QueryMessage>(body) ? 1 : 0;
    };
  }

  static SimOptions Options() {
    SimOptions options;
    options.host_of_rank = {0, 1, 2, 3};
    options.arity = 1;
    return options;
  }
  static Key Named(const std::string& name) { return Key::Named(kWorldSet, name); }

  void Submit(int rank, const std::string& name) {
    sim_.node(rank).Submit({RequestOf(Named(name), AllReduceOf({1}))}, sim_.now());
  }
  void SitIn(int rank, const std::string& name) { sim_.waits_for[rank] = Named(name); }
  void SubmitAndSitIn(int rank, const std::string& name) {
    Submit(rank, name);
    SitIn(rank, name);
  }
  void Run(seconds time) { sim_.Run(time, milliseconds(50)); }
  void ExpectNoFault() {
    for (int rank = 0; rank < sim_.size(); ++rank) EXPECT_FALSE(sim_.node(rank).faulted());
  }

  NegotiationSim sim_;
  int questions_ = 0;
};

constexpr seconds kWarning{60};

TEST_F(CircleTest, TwoRanksInEachOthersWay) {
  SubmitAndSitIn(3, "loss");
  for (const int rank : {1, 2}) Submit(rank, "w");
  SubmitAndSitIn(0, "w");
  Run(kWarning - seconds(1));
  ExpectNoFault();
  EXPECT_EQ(questions_, 0);
  Run(seconds(5));
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_TRUE(sim_.node(rank).faulted()) << "rank " << rank;
    EXPECT_EQ(sim_.node(rank).cause().code, StatusCode::kMismatch);
    EXPECT_THAT(sim_.node(rank).cause().text,
                HasSubstr("ranks wait for each other, so none of them can go on: "));
    EXPECT_THAT(sim_.node(rank).cause().text,
                HasSubstr("rank 0 has not submitted \"loss\" and waits for \"w\"; "));
    EXPECT_THAT(sim_.node(rank).cause().text,
                HasSubstr("rank 3 has not submitted \"w\" and waits for \"loss\"; "));
  }
}

TEST_F(CircleTest, ACircleOfFour) {
  const auto name = [](int rank) { return "k" + std::to_string(rank % 4); };
  for (int rank = 0; rank < 4; ++rank) {
    for (const int other : {2, 3}) Submit(rank, name(rank + other));
    SubmitAndSitIn(rank, name(rank));  // and has not submitted the next one
  }
  Run(kWarning + seconds(5));
  ASSERT_TRUE(sim_.node(0).faulted());
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(sim_.node(0).cause().text,
                HasSubstr("rank " + std::to_string(rank) + " has not submitted \"" +
                          name(rank + 1) + "\" and waits for \"" + name(rank) + "\""));
  }
}

// The stall that is found first is of other ranks.
TEST_F(CircleTest, ACircleBehindAStall) {
  for (const int rank : {0, 2}) Submit(rank, "k");
  Run(seconds(10));
  for (const int rank : {0, 2}) {
    for (const char* name : {"a", "b"}) Submit(rank, name);
  }
  SubmitAndSitIn(1, "a");
  SubmitAndSitIn(3, "b");
  Run(kWarning - seconds(5));
  ASSERT_TRUE(sim_.node(2).faulted());
  EXPECT_THAT(sim_.node(2).cause().text,
              HasSubstr("rank 1 has not submitted \"b\" and waits for \"a\""));
  EXPECT_THAT(sim_.node(2).cause().text, Not(HasSubstr("\"k\"")));
}

// More ranks miss the key than an answer has room for, and the last of them is in the way.
TEST(CircleOfManyTest, ARankThatWaitsIsToldOfBeforeOthers) {
  constexpr int kRanks = static_cast<int>(kMaxActivities) + 4;
  SimOptions options;
  options.host_of_rank.clear();
  for (int rank = 0; rank < kRanks; ++rank) options.host_of_rank.push_back(rank);
  options.arity = kRanks;
  NegotiationSim sim(std::move(options));
  const Key k = Key::Named(kWorldSet, "k");
  const Key x = Key::Named(kWorldSet, "x");
  sim.node(0).Submit({RequestOf(k, AllReduceOf({1}))}, sim.now());
  sim.node(kRanks - 1).Submit({RequestOf(x, AllReduceOf({1}))}, sim.now());
  sim.waits_for = {{0, k}, {kRanks - 1, x}};
  sim.Run(kWarning + seconds(5), milliseconds(50));
  ASSERT_TRUE(sim.node(0).faulted());
  EXPECT_EQ(sim.node(0).cause().code, StatusCode::kMismatch);
}

// The last of a row computes, and comes when it has done so.
TEST_F(CircleTest, ARowIsNoCircle) {
  for (const int rank : {2, 3}) Submit(rank, "a");
  for (const int rank : {0, 3}) Submit(rank, "b");
  for (const int rank : {0, 1}) Submit(rank, "c");
  SubmitAndSitIn(0, "a");
  SubmitAndSitIn(1, "b");
  SubmitAndSitIn(2, "c");
  Run(kWarning + seconds(5));
  EXPECT_GT(questions_, 0);
  ExpectNoFault();
  Submit(3, "c");
  sim_.waits_for.clear();
  Submit(2, "b");
  Submit(1, "a");
  Run(seconds(5));
  ExpectNoFault();
  for (int rank = 0; rank < 4; ++rank) EXPECT_TRUE(sim_.node(rank).Quiescent());
}

// What a rank said of one use of a name is not said of the next.
TEST_F(CircleTest, AnotherUseOfTheNameIsNotMeant) {
  for (const int rank : {0, 1, 2}) Submit(rank, "w");
  Run(2 * kWarning - seconds(2));  // warned of once, and again soon
  for (const int rank : {1, 2}) Submit(rank, "loss");
  SubmitAndSitIn(3, "loss");
  Run(seconds(5));
  ASSERT_GT(questions_, 3);  // rank 3 has said that it waits for "loss"
  // It goes on, while the first rank begins to wait, and others are ahead in "loss".
  Submit(0, "loss");
  sim_.waits_for.erase(3);
  Run(seconds(1));
  for (const int rank : {1, 2}) Submit(rank, "loss");
  SitIn(0, "w");
  const int asked = questions_;
  Run(kWarning + seconds(5));
  EXPECT_GT(questions_, asked);  // about "loss"
  ExpectNoFault();
}

// What the engine still has may be decided already, as this node knows.
TEST_F(CircleTest, ARankDoesNotWaitForWhatIsDecided) {
  for (const int rank : {0, 1, 2}) Submit(rank, "w");
  SitIn(0, "w");
  for (int rank = 0; rank < 4; ++rank) Submit(rank, "loss");
  Run(seconds(1));
  SitIn(3, "loss");
  for (const int rank : {1, 2}) Submit(rank, "loss");
  Run(kWarning + seconds(5));
  EXPECT_GT(questions_, 0);
  ExpectNoFault();
}

TEST_F(CircleTest, WhereStallsHaveNoLimitThisIsNoFaultEither) {
  SimOptions options = Options();
  options.negotiator.stall_limit = {};
  NegotiationSim sim(std::move(options));
  for (const int rank : {0, 3}) {
    const Key key = Named(std::to_string(rank));
    sim.node(rank).Submit({RequestOf(key, AllReduceOf({1}))}, sim.now());
    sim.waits_for[rank] = key;
  }
  sim.Run(minutes(3), seconds(1));
  for (int rank = 0; rank < 4; ++rank) EXPECT_FALSE(sim.node(rank).faulted());
}

TEST(CircleAnswerTest, AnAnswerToAnEarlierQuestionCountsNoMore) {
  SimOptions options;
  options.host_of_rank = {0, 1};
  NegotiationSim sim(std::move(options));
  std::vector<std::string> warnings;
  sim.on_warning = [&](int, const StallWarning& w) { warnings.push_back(StallText(w)); };
  std::uint64_t asked = 0;
  sim.on_send = [&](int, int, const MessageBody& body) {
    if (const auto* query = std::get_if<QueryMessage>(&body)) asked = query->number;
  };
  const Key key = Key::Named(kWorldSet, "w");
  sim.node(0).Submit({RequestOf(key, AllReduceOf({1}))}, sim.now());
  sim.Run(kWarning - seconds(1), milliseconds(50));
  sim.Stop(1);
  for (int i = 0; i < 100 && asked == 0; ++i) sim.Run(milliseconds(50), milliseconds(50));
  ASSERT_NE(asked, 0u);
  sim.node(0).Receive(1, AnswerMessage{key, asked - 1, RankRanges::Single(1), {{1, "old", {}}}},
                      sim.now());
  sim.Run(seconds(4), milliseconds(50));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], HasSubstr("no answer from rank 1"));
}

}  // namespace
}  // namespace sirtaki::core
