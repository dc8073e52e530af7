#include "parallel/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

namespace sirtaki::parallel {
namespace {

using Rows = std::vector<std::vector<int>>;

MeshLayout MeshOf(const std::vector<MeshDimension>& axes, const std::vector<int>& host_of_rank) {
  MeshLayout layout;
  const core::Status status = MeshLayout::Make(axes, host_of_rank, &layout);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return layout;
}

std::string RefusalOf(const std::vector<MeshDimension>& axes, int ranks) {
  MeshLayout layout;
  return MeshLayout::Make(axes, std::vector<int>(static_cast<std::size_t>(ranks), 0), &layout)
      .message();
}

TEST(MeshTest, TheLastAxisGoesOnFirst) {
  const MeshLayout layout = MeshOf({{"data", 2}, {"pipe", 3}}, std::vector<int>(6, 0));
  EXPECT_EQ(layout.RowsAlong(0), (Rows{{0, 3}, {1, 4}, {2, 5}}));
  EXPECT_EQ(layout.RowsAlong(1), (Rows{{0, 1, 2}, {3, 4, 5}}));
}

TEST(MeshTest, ThreeAxes) {
  const MeshLayout layout =
      MeshOf({{"data", 2}, {"pipe", 2}, {"tensor", 2}}, std::vector<int>(8, 0));
  EXPECT_EQ(layout.RowsAlong(0), (Rows{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(layout.RowsAlong(1), (Rows{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(layout.RowsAlong(2), (Rows{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
}

// Ranks that were placed on hosts in turn, as with mpirun --map-by node.
TEST(MeshTest, RanksComeHostByHost) {
  const MeshLayout layout = MeshOf({{"data", 2}, {"tensor", 2}}, {0, 1, 0, 1});
  EXPECT_EQ(layout.RowsAlong(1), (Rows{{0, 2}, {1, 3}}));
  EXPECT_EQ(layout.RowsAlong(0), (Rows{{0, 1}, {2, 3}}));
  // The order along an axis may be another one than that of the ranks.
  EXPECT_EQ(MeshOf({{"data", 2}, {"tensor", 2}}, {0, 1, 1, 0}).RowsAlong(0),
            (Rows{{0, 1}, {3, 2}}));
}

TEST(MeshTest, EachRankIsInOneRowOfEachAxisAndTwoRowsMeetInOneRankAtMost) {
  const MeshLayout layout =
      MeshOf({{"a", 3}, {"b", 1}, {"c", 2}, {"d", 4}},
             {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0});
  std::set<std::vector<int>> rows;
  for (std::size_t axis = 0; axis < 4; ++axis) {
    std::set<int> seen;
    for (const std::vector<int>& row : layout.RowsAlong(axis)) {
      EXPECT_EQ(row.size(), static_cast<std::size_t>(layout.axes()[axis].size));
      for (const int rank : row) EXPECT_TRUE(seen.insert(rank).second);
      for (const std::vector<int>& other : rows) {
        EXPECT_LE(std::count_if(
                      row.begin(), row.end(),
                      [&](int rank) { return std::count(other.begin(), other.end(), rank) > 0; }),
                  1);
      }
    }
    EXPECT_EQ(seen.size(), 24U);
    for (const std::vector<int>& row : layout.RowsAlong(axis)) rows.insert(row);
  }
}

TEST(MeshTest, OneAxisTakesWhatIsLeft) {
  const MeshLayout layout = MeshOf({{"data", -1}, {"pipe", 2}}, std::vector<int>(6, 0));
  EXPECT_EQ(layout.axes()[0].size, 3);
  EXPECT_EQ(layout.RowsAlong(0), (Rows{{0, 2, 4}, {1, 3, 5}}));
}

TEST(MeshTest, WhatDoesNotFitIsRefused) {
  EXPECT_EQ(RefusalOf({{"data", 2}, {"pipe", 2}}, 3),
            "a mesh of \"data\" 2 x \"pipe\" 2 does not fit the job: its sizes have to multiply to "
            "3, the number of ranks");
  EXPECT_EQ(
      RefusalOf({}, 1),
      "a mesh of no axes does not fit the job: its sizes have to multiply to 1, the number of "
      "ranks");
  EXPECT_EQ(
      RefusalOf({{"data", -1}, {"pipe", 2}}, 3),
      "a mesh of \"data\" -1 x \"pipe\" 2 does not fit the job: its sizes have to multiply to "
      "3, the number of ranks");
  const std::string sizes =
      " needs sizes of 1 to 4, the ranks of the job, and -1 at most once for what is left";
  EXPECT_EQ(RefusalOf({{"data", 0}}, 4), "a mesh of \"data\" 0" + sizes);
  EXPECT_EQ(RefusalOf({{"a", -1}, {"b", -1}}, 4), "a mesh of \"a\" -1 x \"b\" -1" + sizes);
  EXPECT_EQ(RefusalOf({{"a", 2147483647}, {"b", 2147483647}}, 4),
            "a mesh of \"a\" 2147483647 x \"b\" 2147483647" + sizes);
  EXPECT_EQ(RefusalOf({{"a", 2}, {"a", 2}}, 4),
            "a mesh of \"a\" 2 x \"a\" 2 needs a name of its own for each axis");
  EXPECT_EQ(RefusalOf({{"", 4}}, 4), "a mesh of \"\" 4 needs a name of its own for each axis");
}

TEST(MeshTest, AnAxisIsFoundByItsName) {
  const MeshLayout layout = MeshOf({{"data", 2}, {"pipe", 2}}, std::vector<int>(4, 0));
  std::size_t axis = 0;
  EXPECT_TRUE(layout.Find("pipe", &axis).ok());
  EXPECT_EQ(axis, 1U);
  EXPECT_EQ(layout.Find("pipes", &axis).message(),
            "there is no axis of the mesh \"pipes\"; allowed is data, pipe; the nearest known is "
            "pipe");
}

}  // namespace
}  // namespace sirtaki::parallel
