#include "core/base/topology.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

namespace sirtaki::core {
namespace {

Topology TopologyOf(int rank, const std::vector<std::string>& hosts) {
  std::vector<Place> places;
  std::map<std::string, int> lowest;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    places.push_back({hosts[i], lowest.try_emplace(hosts[i], static_cast<int>(i)).first->second});
  }
  return BuildTopology(rank, places);
}

TEST(TopologyTest, RanksPlacedHostByHost) {
  const Topology topology = TopologyOf(2, {"a", "a", "b", "b"});
  EXPECT_EQ(topology.local_rank, 0);
  EXPECT_EQ(topology.local_size, 2);
  EXPECT_EQ(topology.cross_rank, 1);
  EXPECT_EQ(topology.cross_size, 2);
  EXPECT_TRUE(topology.homogeneous);
  EXPECT_EQ(topology.host, "b");
  EXPECT_EQ(topology.host_of_rank, (std::vector<int>{0, 0, 1, 1}));
}

TEST(TopologyTest, RanksPlacedInTurns) {
  const Topology topology = TopologyOf(3, {"b", "a", "b", "a"});
  EXPECT_EQ(topology.local_rank, 1);
  EXPECT_EQ(topology.cross_rank, 1);
  EXPECT_EQ(topology.host_of_rank, (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(topology.host_names, (std::vector<std::string>{"b", "a"}));
}

TEST(TopologyTest, UnevenHosts) {
  const std::vector<std::string> hosts{"a", "b", "b", "c", "c"};
  const Topology second_of_c = TopologyOf(4, hosts);
  EXPECT_FALSE(second_of_c.homogeneous);
  EXPECT_EQ(second_of_c.local_rank, 1);
  EXPECT_EQ(second_of_c.cross_rank, 1);  // of b and c
  EXPECT_EQ(second_of_c.cross_size, 2);
  EXPECT_EQ(TopologyOf(3, hosts).cross_rank, 2);
  EXPECT_EQ(TopologyOf(3, hosts).cross_size, 3);
}

// Rank 0 of an elastic job is one that has trained, whatever its slot.
TEST(TopologyTest, LocalRanksAreByTheSlotsOfAHost) {
  const std::vector<Place> places = {
      {"a", 0, 2}, {"a", 0, 0}, {"a", 0, 3}, {"b", 3, 1}, {"b", 3, 0}};
  std::vector<int> local_ranks;
  for (int rank = 0; rank < 5; ++rank)
    local_ranks.push_back(BuildTopology(rank, places).local_rank);
  EXPECT_EQ(local_ranks, (std::vector<int>{1, 0, 2, 1, 0}));
  EXPECT_EQ(BuildTopology(0, places).cross_size, 2);
  EXPECT_EQ(BuildTopology(2, places).cross_size, 1);
}

TEST(TopologyTest, EqualNamesDoNotMakeOneHost) {
  const Topology topology = BuildTopology(1, {{"node", 0}, {"node", 1}});
  EXPECT_EQ(topology.local_size, 1);
  EXPECT_EQ(topology.cross_size, 2);
  EXPECT_EQ(topology.host_of_rank, (std::vector<int>{0, 1}));
}

}  // namespace
}  // namespace sirtaki::core
