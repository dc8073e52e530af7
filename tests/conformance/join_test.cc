// join on threads as ranks.
#include <gtest/gtest.h>

#include <string>

#include "tests/conformance/join_rounds.h"
#include "tests/support/test_scale.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests::conformance {
namespace {

class JoinInprocTest : public ::testing::TestWithParam<int> {};

TEST_P(JoinInprocTest, UnevenBatchesEndRight) {
  const int rounds = tests::ScaledCount(15, 100);
  RunTorchRanks(GetParam(), [&](int) { RunJoinRounds(world_process_set(), rounds); });
}

TEST_P(JoinInprocTest, ASetIsJoinedByItself) {
  if (GetParam() == 1) GTEST_SKIP() << "needs a second rank";
  const int rounds = tests::ScaledCount(4, 100);
  RunTorchRanks(GetParam(), [&](int rank) {
    const int last = GetParam() - 1;
    const auto ends = add_process_set({0, last});
    if (rank == 0 || rank == last) RunJoinRounds(ends, rounds);
    RunJoinRounds(world_process_set(), rounds);
    remove_process_set(ends);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, JoinInprocTest, ::testing::Values(1, 2, 3, 4),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace sirtaki::tests::conformance
