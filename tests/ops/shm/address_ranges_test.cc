#include "ops/shm/address_ranges.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <random>

namespace sirtaki::ops::shm {
namespace {

TEST(AddressRangesTest, TakesTheSmallestThatFits) {
  AddressRanges ranges(100);
  EXPECT_EQ(ranges.Take(10), 0);
  EXPECT_EQ(ranges.Take(5), 10);
  EXPECT_EQ(ranges.Take(20), 15);
  EXPECT_EQ(ranges.Take(5), 35);
  ranges.Give(0, 10);
  ranges.Give(15, 20);
  EXPECT_EQ(ranges.Take(8), 0);
  EXPECT_EQ(ranges.Take(8), 15);
  EXPECT_EQ(ranges.Take(61), -1);
  EXPECT_EQ(ranges.Take(60), 40);
}

TEST(AddressRangesTest, NeighboursBecomeOne) {
  AddressRanges ranges(30);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ranges.Take(10), 10 * i);
  EXPECT_EQ(ranges.count(), 0U);
  ranges.Give(0, 10);
  ranges.Give(20, 10);
  EXPECT_EQ(ranges.count(), 2U);
  ranges.Give(10, 10);
  EXPECT_EQ(ranges.count(), 1U);
  EXPECT_EQ(ranges.Take(30), 0);
}

TEST(AddressRangesTest, WhatIsTakenNeverOverlapsAndAllComesBack) {
  constexpr std::int64_t kAll = 1 << 16;
  AddressRanges ranges(kAll);
  std::mt19937 random(7);
  std::map<std::int64_t, std::int64_t> taken;
  for (int i = 0; i < 20000; ++i) {
    if (random() % 2 == 0) {
      const std::int64_t bytes = 1 + random() % 700;
      const std::int64_t offset = ranges.Take(bytes);
      if (offset < 0) continue;
      ASSERT_LE(offset + bytes, kAll);
      const auto after = taken.lower_bound(offset);
      ASSERT_TRUE(after == taken.end() || after->first >= offset + bytes);
      if (after != taken.begin()) {
        const auto before = std::prev(after);
        ASSERT_LE(before->first + before->second, offset);
      }
      taken.emplace(offset, bytes);
    } else if (!taken.empty()) {
      const auto some = std::next(taken.begin(), static_cast<int>(random() % taken.size()));
      ranges.Give(some->first, some->second);
      taken.erase(some);
    }
  }
  for (const auto& [offset, bytes] : taken) ranges.Give(offset, bytes);
  EXPECT_EQ(ranges.count(), 1U);
  EXPECT_EQ(ranges.Take(kAll), 0);
}

}  // namespace
}  // namespace sirtaki::ops::shm
