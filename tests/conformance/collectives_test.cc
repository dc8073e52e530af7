// The table on threads as ranks.
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <tuple>

#include "tests/conformance/case_runner.h"
#include "tests/support/test_scale.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests::conformance {
namespace {

// Of three and four ranks some pretend to be on another host, so that local is not the world.
std::vector<int> HostsOf(int size) {
  if (size == 3) return {0, 1, 1};
  if (size == 4) return {0, 0, 1, 1};
  return {};
}

class CollectivesInprocTest : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(CollectivesInprocTest, GiveWhatNaiveLoopsGive) {
  const auto collective = static_cast<Collective>(std::get<0>(GetParam()));
  const int percent = sirtaki::testing::ScaledCount(100, 100);
  RunTorchRanks(
      std::get<1>(GetParam()),
      [&](int rank, const Session& session) {
        CaseRunner runner(session);
        runner.TellOfEach(RankThreads::Note);
        runner.Run(collective, percent);
        runner.RemoveSets();
        if (rank == 0) {
          std::printf("%lld cases\n", static_cast<long long>(runner.cases()));
        }
      },
      {}, HostsOf(std::get<1>(GetParam())));
}

INSTANTIATE_TEST_SUITE_P(All, CollectivesInprocTest,
                         ::testing::Combine(::testing::Range(0, kCollectiveCount),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& made) {
                           const auto collective = static_cast<Collective>(std::get<0>(made.param));
                           return std::string(NameOf(collective)) + "_ranks_" +
                                  std::to_string(std::get<1>(made.param));
                         });

TEST(CaseTableTest, TheReadmeTellsHowManyCasesThereAre) {
  std::ifstream file(SIRTAKI_SOURCE_DIR "/README.md");
  std::ostringstream text;
  text << file.rdbuf();
  const std::string readme = text.str();
  std::smatch match;
  ASSERT_TRUE(std::regex_search(readme, match, std::regex("([0-9 ]+) conformance cases")));
  std::string digits = match[1];
  std::erase(digits, ' ');
  EXPECT_EQ(digits, std::to_string(CountAllCases()));
}

}  // namespace
}  // namespace sirtaki::tests::conformance
