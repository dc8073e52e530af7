#include "parallel/split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace sirtaki::parallel {
namespace {

using testing::HasSubstr;

TEST(SplitTest, TheFirstRanksHaveAUnitMore) {
  const Split heads = {.size = 5 * 8, .unit = 8, .ranks = 3};
  EXPECT_EQ(PartSize(heads, 0), 16);
  EXPECT_EQ(PartSize(heads, 1), 16);
  EXPECT_EQ(PartSize(heads, 2), 8);
  EXPECT_EQ(RangesOf(heads, 2).front().begin, 32);
}

TEST(SplitTest, EachBlockIsSplitByItself) {
  const auto ranges = RangesOf({.size = 12, .blocks = 3, .ranks = 2}, 1);
  ASSERT_EQ(ranges.size(), 3U);
  for (std::int64_t block = 0; block < 3; ++block) {
    EXPECT_EQ(ranges[static_cast<std::size_t>(block)].begin, 4 * block + 2);
    EXPECT_EQ(ranges[static_cast<std::size_t>(block)].count, 2);
  }
}

TEST(SplitTest, PartsMakeUpTheWhole) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto up_to = [&random](int most) {
    return std::uniform_int_distribution<int>(1, most)(random);
  };
  for (int round = 0; round < 200; ++round) {
    Split split = {.blocks = up_to(4), .unit = up_to(5), .ranks = up_to(6)};
    split.size = split.blocks * split.unit * (split.ranks + up_to(9) - 1);
    ASSERT_TRUE(CheckSplit(split, "size").ok()) << CheckSplit(split, "size").message();
    std::vector<int> owners(static_cast<std::size_t>(split.size), 0);
    std::int64_t all = 0;
    for (int index = 0; index < split.ranks; ++index) {
      all += PartSize(split, index);
      EXPECT_EQ(PartSize(split, index) % (split.blocks * split.unit), 0);
      for (const auto& [begin, count] : RangesOf(split, index)) {
        for (std::int64_t i = begin; i < begin + count; ++i) {
          ++owners.at(static_cast<std::size_t>(i));
        }
      }
    }
    EXPECT_EQ(all, split.size);
    for (const int count : owners) EXPECT_EQ(count, 1);
  }
}

TEST(SplitTest, WhatCannotBeSharedIsRefused) {
  EXPECT_THAT(
      CheckSplit({.size = 5, .ranks = 8}, "out_features").message(),
      HasSubstr("out_features is 5, which 8 ranks cannot share: split it over at most 5 ranks"));
  EXPECT_THAT(
      CheckSplit({.size = 64, .blocks = 2, .unit = 32, .ranks = 2}, "size").message(),
      HasSubstr("64 in 2 blocks in units of 32, which 2 ranks cannot share: split it over at "
                "most 1 rank"));
  EXPECT_THAT(CheckSplit({.size = 10, .blocks = 3}, "size").message(),
              HasSubstr("has to be a multiple of 3 times 1"));
  EXPECT_THAT(CheckSplit({.size = 0}, "size").message(),
              HasSubstr("size is 0; it has to be at least 1"));
  EXPECT_THAT(CheckSplit({.size = 4, .unit = -1}, "size").message(), HasSubstr("unit is -1"));
}

}  // namespace
}  // namespace sirtaki::parallel
