#include "core/protocol/tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "tests/support/test_scale.h"

namespace sirtaki::core {
namespace {

// The tree as its description says, by the plainest means: parents only.
std::vector<int> ExpectedParents(const std::vector<int>& host_of_rank, int arity) {
  std::map<int, int> leader_of_host;
  for (std::size_t rank = 0; rank < host_of_rank.size(); ++rank) {
    leader_of_host.try_emplace(host_of_rank[rank], static_cast<int>(rank));
  }
  std::vector<int> leaders;
  leaders.reserve(leader_of_host.size());
  for (const auto& [host, leader] : leader_of_host) leaders.push_back(leader);
  std::sort(leaders.begin(), leaders.end());
  std::vector<int> parents(host_of_rank.size());
  for (std::size_t rank = 0; rank < host_of_rank.size(); ++rank) {
    const int leader = leader_of_host[host_of_rank[rank]];
    parents[rank] = leader;
    if (leader != static_cast<int>(rank)) continue;
    const int place =
        static_cast<int>(std::find(leaders.begin(), leaders.end(), leader) - leaders.begin());
    parents[rank] = place == 0 ? -1 : leaders[static_cast<std::size_t>((place - 1) / arity)];
  }
  return parents;
}

// Who is below whom, by walking up from every rank.
std::vector<std::set<int>> ExpectedSubtrees(const std::vector<int>& parents) {
  std::vector<std::set<int>> subtrees(parents.size());
  for (std::size_t rank = 0; rank < parents.size(); ++rank) {
    for (int above = static_cast<int>(rank); above >= 0;
         above = parents[static_cast<std::size_t>(above)]) {
      subtrees[static_cast<std::size_t>(above)].insert(static_cast<int>(rank));
    }
  }
  return subtrees;
}

std::set<int> AsSet(const RankRanges& ranks) {
  const auto all = ranks.ToVector();
  return {all.begin(), all.end()};
}

TEST(TreeTest, OneRankIsARootWithoutChildren) {
  const Tree::Node node = Tree({17}, 8).NodeOf(0);
  EXPECT_EQ(node.parent, -1);
  EXPECT_TRUE(node.children.empty());
  EXPECT_EQ(node.subtree, RankRanges::Single(0));
}

TEST(TreeTest, RanksOfAHostReportToItsLowestRank) {
  const Tree tree({5, 5, 9, 9, 9}, 2);
  EXPECT_EQ(tree.NodeOf(1).parent, 0);
  EXPECT_EQ(tree.NodeOf(2).parent, 0);
  EXPECT_EQ(tree.NodeOf(4).parent, 2);
  EXPECT_EQ(tree.NodeOf(0).children, (std::vector<int>{1, 2}));
  EXPECT_EQ(tree.NodeOf(0).child_subtrees[1].ToString(), "2-4");
}

TEST(TreeTest, LeadersFormAHeapInRankOrder) {
  const Tree tree({0, 1, 2, 3, 4, 5, 6}, 2);
  EXPECT_EQ(tree.NodeOf(1).children, (std::vector<int>{3, 4}));
  EXPECT_EQ(tree.NodeOf(6).parent, 2);
  EXPECT_EQ(tree.NodeOf(1).subtree.ToString(), "1, 3-4");
}

TEST(TreeTest, MatchesThePlainConstructionForAnyHosts) {
  std::mt19937_64 random(tests::TestSeed());
  const int rounds = tests::ScaledCount(300, 20000);
  for (int round = 0; round < rounds; ++round) {
    const int size = 1 + static_cast<int>(random() % 60);
    const int hosts = 1 + static_cast<int>(random() % static_cast<unsigned>(size));
    const int arity = 1 + static_cast<int>(random() % 9);
    const bool blocks = random() % 2 == 0;  // as launchers place ranks, or anyhow
    std::vector<int> host_of_rank;
    host_of_rank.reserve(static_cast<std::size_t>(size));
    for (int rank = 0; rank < size; ++rank) {
      host_of_rank.push_back(blocks ? 1000 - rank * hosts / size
                                    : static_cast<int>(random() % static_cast<unsigned>(hosts)));
    }
    const auto parents = ExpectedParents(host_of_rank, arity);
    const auto subtrees = ExpectedSubtrees(parents);
    const Tree tree(host_of_rank, arity);
    ASSERT_EQ(tree.size(), size);
    for (int rank = 0; rank < size; ++rank) {
      SCOPED_TRACE("rank " + std::to_string(rank) + " of " + std::to_string(size));
      const Tree::Node node = tree.NodeOf(rank);
      ASSERT_EQ(node.parent, parents[static_cast<std::size_t>(rank)]);
      ASSERT_EQ(AsSet(node.subtree), subtrees[static_cast<std::size_t>(rank)]);
      std::vector<int> children;
      for (int other = 0; other < size; ++other) {
        if (parents[static_cast<std::size_t>(other)] == rank) children.push_back(other);
      }
      ASSERT_EQ(node.children, children);
      ASSERT_EQ(node.child_subtrees.size(), children.size());
      for (std::size_t i = 0; i < children.size(); ++i) {
        ASSERT_EQ(AsSet(node.child_subtrees[i]), subtrees[static_cast<std::size_t>(children[i])]);
      }
    }
  }
}

// All nodes of a large world: a subtree is a few ranges, whatever it holds, so this is quick even
// for a chain of hosts. (Were each node to visit its subtree rank by rank, arity 1 would take
// minutes.)
TEST(TreeTest, LargeWorldsHaveSmallNodes) {
  constexpr int kSize = 65536;
  for (const int ranks_per_host : {1, 8}) {
    for (const int arity : {1, 2, 8}) {
      std::vector<int> host_of_rank(kSize);
      for (int rank = 0; rank < kSize; ++rank) {
        host_of_rank[static_cast<std::size_t>(rank)] = rank / ranks_per_host;
      }
      const Tree tree(host_of_rank, arity);
      std::int64_t edges = 0;
      std::size_t most_ranges = 0;
      for (int rank = 0; rank < kSize; ++rank) {
        const Tree::Node node = tree.NodeOf(rank);
        edges += static_cast<std::int64_t>(node.children.size());
        most_ranges = std::max(most_ranges, node.subtree.ranges().size());
      }
      EXPECT_EQ(edges, kSize - 1);
      EXPECT_LE(most_ranges, 17U);  // one for each level
      EXPECT_EQ(tree.NodeOf(0).subtree, RankRanges::Span(0, kSize - 1));
    }
  }
}

TEST(TreeTest, LargeWorldsPlacedRoundRobinAreBuiltTheSameWay) {
  constexpr int kSize = 65536;
  constexpr int kHosts = 4096;
  std::vector<int> host_of_rank(kSize);
  for (int rank = 0; rank < kSize; ++rank) {
    host_of_rank[static_cast<std::size_t>(rank)] = rank % kHosts;
  }
  const Tree tree(host_of_rank, 8);
  EXPECT_EQ(tree.NodeOf(0).subtree, RankRanges::Span(0, kSize - 1));
  EXPECT_EQ(tree.NodeOf(kHosts - 1).subtree.Count(), kSize / kHosts);
  EXPECT_EQ(tree.NodeOf(kSize - 1).parent, kHosts - 1);
}

}  // namespace
}  // namespace sirtaki::core
