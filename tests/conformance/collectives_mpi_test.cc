// RANKS: 1 2 3 4
// The table over MPI.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "tests/conformance/case_runner.h"
#include "tests/support/test_scale.h"

namespace sirtaki::tests::conformance {
namespace {

class CollectivesMpiTest : public ::testing::TestWithParam<int> {
 protected:
  static void SetUpTestSuite() { init(); }
  static void TearDownTestSuite() { shutdown(); }
};

TEST_P(CollectivesMpiTest, GiveWhatNaiveLoopsGive) {
  CaseRunner runner;
  const std::string seed =
      broadcast_object(rank() == 0 ? std::to_string(tests::TestSeed()) : std::string(), 0);
  runner.Run(static_cast<Collective>(GetParam()), tests::ScaledCount(15, 100), std::stoull(seed));
  runner.RemoveSets();
  if (rank() == 0) std::printf("%lld cases\n", static_cast<long long>(runner.cases()));
}

INSTANTIATE_TEST_SUITE_P(All, CollectivesMpiTest, ::testing::Range(0, kCollectiveCount),
                         [](const auto& made) {
                           return std::string(NameOf(static_cast<Collective>(made.param)));
                         });

}  // namespace
}  // namespace sirtaki::tests::conformance
