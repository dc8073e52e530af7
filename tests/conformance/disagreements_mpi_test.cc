// RANKS: 2 3 4
// Errors that every rank must get, over MPI.
#include <gtest/gtest.h>

#include <string>

#include "tests/conformance/disagreements.h"

namespace sirtaki::tests::conformance {
namespace {

class MismatchMpiTest : public ::testing::TestWithParam<int> {
 protected:
  static void SetUpTestSuite() { init(); }
  static void TearDownTestSuite() { shutdown(); }
};

TEST_P(MismatchMpiTest, IsToldToEveryRankAndTheNameWorksAgain) {
  RunMismatches(static_cast<Collective>(GetParam()), size() - 1);
  RunMismatches(static_cast<Collective>(GetParam()), 0);
}

INSTANTIATE_TEST_SUITE_P(All, MismatchMpiTest, ::testing::Range(0, kCollectiveCount),
                         [](const auto& made) {
                           return std::string(NameOf(static_cast<Collective>(made.param)));
                         });

class WrongCallMpiTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { init(); }
  static void TearDownTestSuite() { shutdown(); }
};

TEST_F(WrongCallMpiTest, ThreeGroupsOfRanksAreEachTold) {
  if (size() < 3) GTEST_SKIP() << "needs three ranks";
  RunThreeWayMismatch();
}

TEST_F(WrongCallMpiTest, AnArgumentThatOneRankGotWrongIsToldToAll) {
  RunWrongArguments(size() - 1);
  RunWrongArguments(0);
}

TEST_F(WrongCallMpiTest, SetsOfOthersAndSetsThatAreGoneAreRefused) { RunWrongSets(); }

}  // namespace
}  // namespace sirtaki::tests::conformance
