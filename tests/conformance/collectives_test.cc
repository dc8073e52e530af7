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

// Some of three and four ranks pretend to be on another host, so that local is not the world.
std::vector<int> HostsOf(int size) {
  if (size == 3) return {0, 1, 1};
  if (size == 4) return {0, 0, 1, 1};
  return {};
}

using Sharing = session::InprocWorld::Sharing;

// Every collective on so many ranks.
void RunTable(int parameter, int size, Sharing sharing, std::vector<int> host_of_rank,
              int percent) {
  const auto collective = static_cast<Collective>(parameter);
  const std::uint64_t seed = tests::TestSeed();
  RunTorchRanks(
      size,
      [&](int rank) {
        CaseRunner runner;
        runner.TellOfEach(RankThreads::Note);
        runner.Run(collective, percent, seed);
        runner.RemoveSets();
        if (rank == 0) {
          std::printf("%lld cases\n", static_cast<long long>(runner.cases()));
        }
      },
      {}, std::move(host_of_rank), sharing);
}

std::string NameOf(int collective, int size) {
  return std::string(NameOf(static_cast<Collective>(collective))) + "_ranks_" +
         std::to_string(size);
}

class CollectivesInprocTest : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(CollectivesInprocTest, GiveWhatNaiveLoopsGive) {
  const auto [collective, size] = GetParam();
  RunTable(collective, size, Sharing::kNone, HostsOf(size), tests::ScaledCount(10, 100));
}

INSTANTIATE_TEST_SUITE_P(All, CollectivesInprocTest,
                         ::testing::Combine(::testing::Range(0, kCollectiveCount),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& made) {
                           return NameOf(std::get<0>(made.param), std::get<1>(made.param));
                         });

class CollectivesSharedTest : public ::testing::TestWithParam<std::tuple<int, int, Sharing>> {};

TEST_P(CollectivesSharedTest, GiveWhatNaiveLoopsGive) {
  const auto [collective, size, sharing] = GetParam();
  RunTable(collective, size, sharing, {}, tests::ScaledCount(3, 100));
}

INSTANTIATE_TEST_SUITE_P(All, CollectivesSharedTest,
                         ::testing::Combine(::testing::Range(0, kCollectiveCount),
                                            ::testing::Values(2, 3, 4),
                                            ::testing::Values(Sharing::kDirect, Sharing::kStaged)),
                         [](const auto& made) {
                           return NameOf(std::get<0>(made.param), std::get<1>(made.param)) +
                                  (std::get<2>(made.param) == Sharing::kDirect ? "_direct"
                                                                               : "_staged");
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
