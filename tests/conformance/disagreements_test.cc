// Errors that every rank must get, on threads as ranks.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "tests/conformance/disagreements.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests::conformance {
namespace {

class MismatchInprocTest : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(MismatchInprocTest, IsToldToEveryRankAndTheNameWorksAgain) {
  const auto collective = static_cast<Collective>(std::get<0>(GetParam()));
  const int size = std::get<1>(GetParam());
  RunTorchRanks(size, [&](int) {
    RunMismatches(collective, size - 1);
    RunMismatches(collective, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(All, MismatchInprocTest,
                         ::testing::Combine(::testing::Range(0, kCollectiveCount),
                                            ::testing::Values(2, 3, 4)),
                         [](const auto& made) {
                           const auto collective = static_cast<Collective>(std::get<0>(made.param));
                           return std::string(NameOf(collective)) + "_ranks_" +
                                  std::to_string(std::get<1>(made.param));
                         });

class WrongCallInprocTest : public ::testing::TestWithParam<int> {};

TEST_P(WrongCallInprocTest, ThreeGroupsOfRanksAreEachTold) {
  if (GetParam() < 3) GTEST_SKIP() << "needs three ranks";
  RunTorchRanks(GetParam(), [](int) { RunThreeWayMismatch(); });
}

TEST_P(WrongCallInprocTest, AnArgumentThatOneRankGotWrongIsToldToAll) {
  RunTorchRanks(GetParam(), [](int) {
    RunWrongArguments(size() - 1);
    RunWrongArguments(0);
  });
}

TEST_P(WrongCallInprocTest, SetsOfOthersAndSetsThatAreGoneAreRefused) {
  RunTorchRanks(GetParam(), [](int) { RunWrongSets(); });
}

INSTANTIATE_TEST_SUITE_P(Ranks, WrongCallInprocTest, ::testing::Values(2, 3, 4),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace sirtaki::tests::conformance
