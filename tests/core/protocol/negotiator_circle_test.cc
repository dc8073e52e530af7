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
using tests::AllReduceOf;
using tests::NegotiationSim;
using tests::RequestOf;
using tests::SimOptions;

class CircleTest : public ::testing::Test {
 protected:
  // A chain of four hosts, so that what rank 3 says passes two others.
  CircleTest() : sim_(Options()) {}

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
  // The rank submits nothing else from now on, and has waited long enough to say so.
  void SitIn(int rank, const std::string& name) {
    Submit(rank, name);
    sim_.waits_for[rank] = Named(name);
    sim_.node(rank).HeldUpBy(Named(name), sim_.now());
  }
  void Run() { sim_.Run(seconds(10), milliseconds(50)); }
  void ExpectNoFault() {
    for (int rank = 0; rank < sim_.size(); ++rank) EXPECT_FALSE(sim_.node(rank).faulted());
  }
  int Questions() const { return questions_; }
  void Count() {
    sim_.on_send = [this](int, int, const MessageBody& body) {
      questions_ += std::holds_alternative<QueryMessage>(body) ? 1 : 0;
    };
  }

  NegotiationSim sim_;
  int questions_ = 0;
};

TEST_F(CircleTest, TwoRanksInEachOthersWay) {
  SitIn(3, "loss");
  for (const int rank : {1, 2}) Submit(rank, "w");
  SitIn(0, "w");
  Run();
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
    SitIn(rank, name(rank));  // and has not submitted the next one
  }
  Run();
  ASSERT_TRUE(sim_.node(0).faulted());
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(sim_.node(0).cause().text,
                HasSubstr("rank " + std::to_string(rank) + " has not submitted \"" +
                          name(rank + 1) + "\" and waits for \"" + name(rank) + "\""));
  }
}

// The last of a row computes, and comes when it has done so.
TEST_F(CircleTest, ARowIsNoCircle) {
  for (const int rank : {2, 3}) Submit(rank, "a");
  for (const int rank : {0, 3}) Submit(rank, "b");
  for (const int rank : {0, 1}) Submit(rank, "c");
  SitIn(0, "a");
  SitIn(1, "b");
  SitIn(2, "c");
  Run();
  ExpectNoFault();
  Submit(3, "c");
  sim_.waits_for.clear();
  Submit(2, "b");
  Submit(1, "a");
  Run();
  ExpectNoFault();
  for (int rank = 0; rank < 4; ++rank) EXPECT_TRUE(sim_.node(rank).Quiescent());
}

// What one rank said at first is no longer true when it is asked again.
TEST_F(CircleTest, ARankThatWentOnBetweenTheQuestionsIsInNobodysWay) {
  Count();
  for (const int rank : {1, 2}) Submit(rank, "w");
  SitIn(0, "w");
  SitIn(3, "loss");
  // The question about "w" passes three links, that about "loss" none: rank 0 asks itself.
  for (int i = 0; i < 1000 && Questions() < 4; ++i) {
    for (int rank = 0; rank < 4; ++rank) sim_.Pump(rank);
    const auto busy = sim_.BusyLinks();
    if (!busy.empty()) sim_.Deliver(busy.front());
  }
  ASSERT_EQ(Questions(), 4);
  ExpectNoFault();
  sim_.waits_for.erase(3);
  Run();
  ExpectNoFault();
}

TEST_F(CircleTest, NobodyIsAskedWhereRanksWaitForOneKey) {
  Count();
  for (const int rank : {0, 1, 2}) SitIn(rank, "w");
  Run();
  EXPECT_EQ(Questions(), 0);
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
    sim.node(rank).HeldUpBy(key, sim.now());
  }
  sim.Run(minutes(2), seconds(1));
  for (int rank = 0; rank < 4; ++rank) EXPECT_FALSE(sim.node(rank).faulted());
}

}  // namespace
}  // namespace sirtaki::core
