#include "core/base/rank_ranges.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <random>
#include <set>

#include "tests/support/test_scale.h"

namespace sirtaki::core {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();

std::set<int> AsSet(const RankRanges& ranks) {
  const auto all = ranks.ToVector();
  return {all.begin(), all.end()};
}

// Sorted, disjoint, and no two that could be one.
void ExpectWellFormed(const RankRanges& ranks) {
  const auto& ranges = ranks.ranges();
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    ASSERT_LE(ranges[i].first, ranges[i].last);
    if (i == 0) continue;
    ASSERT_GT(std::int64_t{ranges[i].first}, std::int64_t{ranges[i - 1].last} + 1);
  }
}

TEST(RankRangesTest, NeighboursBecomeOneRange) {
  RankRanges ranks{5, 0, 2, 1};
  EXPECT_TRUE(std::ranges::equal(ranks.ranges(), std::vector<RankRange>{{0, 2}, {5, 5}}));
  EXPECT_EQ(ranks.ToString(), "0-2, 5");
  ranks.Add(4);
  ranks.Add(3);
  EXPECT_TRUE(std::ranges::equal(ranks.ranges(), std::vector<RankRange>{{0, 5}}));
}

TEST(RankRangesTest, EmptySaysNone) {
  EXPECT_EQ(RankRanges().ToString(), "none");
  EXPECT_TRUE(RankRanges::Span(3, 2).empty());
  EXPECT_EQ(RankRanges().Count(), 0);
}

TEST(RankRangesTest, RemovingTheMiddleSplits) {
  RankRanges ranks = RankRanges::Span(0, 9);
  ranks.Remove(RankRanges{3, 4, 9});
  EXPECT_EQ(ranks.ToString(), "0-2, 5-8");
}

TEST(RankRangesTest, IndexCountsMembersOnly) {
  const RankRanges ranks{2, 3, 7};
  EXPECT_EQ(ranks.IndexOf(2), 0);
  EXPECT_EQ(ranks.IndexOf(3), 1);
  EXPECT_EQ(ranks.IndexOf(7), 2);
  EXPECT_EQ(ranks.IndexOf(5), -1);
  EXPECT_EQ(ranks.IndexOf(8), -1);
}

TEST(RankRangesTest, LargestRankIsARank) {
  RankRanges ranks = RankRanges::Single(kMaxInt);
  ranks.Add(kMaxInt);
  ranks.Add(kMaxInt - 1);
  EXPECT_EQ(ranks.Count(), 2);
  EXPECT_TRUE(ranks.Contains(kMaxInt));
  RankRanges all = RankRanges::Span(0, kMaxInt);
  EXPECT_EQ(all.Count(), std::int64_t{1} << 31);
  all.Remove(ranks);
  EXPECT_EQ(all, RankRanges::Span(0, kMaxInt - 2));
}

TEST(RankRangesTest, AnOperationWithItselfIsWellDefined) {
  RankRanges ranks{1, 2, 5};
  ranks.Add(ranks);
  EXPECT_EQ(ranks.ToString(), "1-2, 5");
  ranks.Remove(ranks);
  EXPECT_TRUE(ranks.empty());
}

TEST(RankRangesTest, BehavesAsASetOfRanks) {
  std::mt19937_64 random(tests::TestSeed());
  const int rounds = tests::ScaledCount(2000, 100000);
  for (int round = 0; round < rounds; ++round) {
    const int world = 1 + static_cast<int>(random() % 24);
    const auto draw = [&](RankRanges* ranks, std::set<int>* expected) {
      const int count = static_cast<int>(random() % 16);
      for (int i = 0; i < count; ++i) {
        const int rank = static_cast<int>(random() % static_cast<unsigned>(world));
        ranks->Add(rank);
        expected->insert(rank);
      }
    };
    RankRanges a;
    RankRanges b;
    std::set<int> expected_a;
    std::set<int> expected_b;
    draw(&a, &expected_a);
    draw(&b, &expected_b);
    ExpectWellFormed(a);
    ASSERT_EQ(AsSet(a), expected_a);
    ASSERT_EQ(a.Count(), static_cast<std::int64_t>(expected_a.size()));
    for (int rank = -1; rank <= world; ++rank) {
      const auto found = expected_a.find(rank);
      ASSERT_EQ(a.Contains(rank), found != expected_a.end());
      ASSERT_EQ(a.IndexOf(rank),
                found == expected_a.end() ? -1 : std::distance(expected_a.begin(), found));
    }

    std::set<int> common;
    std::set_intersection(expected_a.begin(), expected_a.end(), expected_b.begin(),
                          expected_b.end(), std::inserter(common, common.end()));
    ExpectWellFormed(a.Intersection(b));
    ASSERT_EQ(AsSet(a.Intersection(b)), common);
    ASSERT_EQ(a.Intersects(b), !common.empty());
    ASSERT_EQ(a.ContainsAll(b), common == expected_b);

    RankRanges sum = a;
    sum.Add(b);
    std::set<int> expected_sum = expected_a;
    expected_sum.insert(expected_b.begin(), expected_b.end());
    ExpectWellFormed(sum);
    ASSERT_EQ(AsSet(sum), expected_sum) << a.ToString() << " and " << b.ToString();

    RankRanges difference = a;
    difference.Remove(b);
    std::set<int> expected_difference;
    for (int rank : expected_a) {
      if (expected_b.count(rank) == 0) expected_difference.insert(rank);
    }
    ExpectWellFormed(difference);
    ASSERT_EQ(AsSet(difference), expected_difference) << a.ToString() << " - " << b.ToString();
    ASSERT_EQ(a == b, expected_a == expected_b);
  }
}

}  // namespace
}  // namespace sirtaki::core
