// RANKS: 1 2 3 4
// join over MPI.
#include <gtest/gtest.h>

#include "tests/conformance/join_rounds.h"
#include "tests/support/test_scale.h"

namespace sirtaki::tests::conformance {
namespace {

class JoinMpiTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { init(); }
  static void TearDownTestSuite() { shutdown(); }
};

TEST_F(JoinMpiTest, UnevenBatchesEndRight) {
  RunJoinRounds(world_process_set(), tests::ScaledCount(15, 100));
}

TEST_F(JoinMpiTest, ASetIsJoinedByItself) {
  if (size() == 1) GTEST_SKIP() << "needs a second rank";
  const int last = size() - 1;
  const auto ends = add_process_set({0, last});
  if (rank() == 0 || rank() == last) RunJoinRounds(ends, tests::ScaledCount(4, 100));
  RunJoinRounds(world_process_set(), tests::ScaledCount(4, 100));
  remove_process_set(ends);
}

}  // namespace
}  // namespace sirtaki::tests::conformance
