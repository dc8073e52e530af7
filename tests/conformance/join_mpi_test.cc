// RANKS: 1 2 3 4
// join over MPI.
#include <gtest/gtest.h>

#include "tests/conformance/join_rounds.h"

namespace sirtaki::tests::conformance {
namespace {

class JoinMpiTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { init(); }
  static void TearDownTestSuite() { shutdown(); }
};

TEST_F(JoinMpiTest, UnevenBatchesEndRightAHundredTimes) {
  RunJoinRounds({}, world_process_set(), 100);
}

TEST_F(JoinMpiTest, ASetIsJoinedByItself) {
  if (size() == 1) GTEST_SKIP() << "needs a second rank";
  const int last = size() - 1;
  const auto ends = add_process_set({0, last});
  if (rank() == 0 || rank() == last) RunJoinRounds({}, ends, 10);
  RunJoinRounds({}, world_process_set(), 10);
  remove_process_set(ends);
}

}  // namespace
}  // namespace sirtaki::tests::conformance
