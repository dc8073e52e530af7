#include "sirtaki/random.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

#include "frameworks/torch/tensors/seed_mix.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(SeedTest, SplitMix64IsTheKnownOne) {
  // The first numbers of the published generator for the state 0.
  EXPECT_EQ(detail::SplitMix64(0), 0xe220a8397b1dcdafU);
  EXPECT_EQ(detail::SplitMix64(0x9e3779b97f4a7c15U), 0x6e789e6aa1b965f4U);
}

// LibTorch seeds the CPU's generator with the low 32 bits.
TEST(SeedTest, NoTwoRanksOfAJobShareOne) {
  for (const std::uint64_t seed : {0ULL, 1ULL, 0xffffffffULL, ~0ULL}) {
    std::set<std::uint32_t> seeds;
    for (int rank = 0; rank < 20000; ++rank) {
      seeds.insert(static_cast<std::uint32_t>(detail::SeedOfRank(seed, rank)));
    }
    EXPECT_EQ(seeds.size(), 20000u) << seed;
  }
}

TEST(SeedTest, NeighbouringSeedsShareNone) {
  std::set<std::uint32_t> seeds;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    for (int rank = 0; rank < 20; ++rank) {
      seeds.insert(static_cast<std::uint32_t>(detail::SeedOfRank(seed, rank)));
    }
  }
  EXPECT_EQ(seeds.size(), 400u);
}

TEST(SeedAllTest, GivesDifferentOrEqualSeeds) {
  std::vector<std::uint64_t> different(3);
  RunTorchRanks(3, [&](int rank) {
    different[static_cast<std::size_t>(rank)] = seed_all(7, SeedMode::DifferentPerRank);
    EXPECT_EQ(seed_all(7, SeedMode::EqualOnAllRanks), 7u);
  });
  EXPECT_EQ(std::set<std::uint64_t>(different.begin(), different.end()).size(), 3u);
}

TEST(SeedAllTest, SeedsAndModesThatDifferAreRefused) {
  RunTorchRanks(2, [&](int rank) {
    EXPECT_THAT(
        ErrorOf(ErrorCode::Mismatch,
                [&] { seed_all(static_cast<std::uint64_t>(rank), SeedMode::DifferentPerRank); }),
        AllOf(HasSubstr("seed 0, different per rank on rank 0"),
              HasSubstr("seed 1, different per rank on rank 1")));
    const auto mode = rank == 0 ? SeedMode::DifferentPerRank : SeedMode::EqualOnAllRanks;
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { seed_all(5, mode); }),
                HasSubstr("seed 5, equal on all ranks on rank 1"));
  });
}

}  // namespace
}  // namespace sirtaki::tests
