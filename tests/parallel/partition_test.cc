#include "parallel/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/support/test_scale.h"

namespace sirtaki::parallel {
namespace {

std::vector<int> Cut(const std::vector<double>& weights, int stages) {
  std::vector<int> begins;
  const core::Status status = CutLayers(weights, stages, &begins);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return begins;
}

std::string Refusal(const std::vector<double>& weights, int stages) {
  std::vector<int> begins;
  return CutLayers(weights, stages, &begins).message();
}

double Heaviest(const std::vector<double>& weights, const std::vector<int>& begins) {
  double heaviest = 0;
  for (std::size_t s = 0; s + 1 < begins.size(); ++s) {
    heaviest = std::max(heaviest, std::accumulate(weights.begin() + begins[s],
                                                  weights.begin() + begins[s + 1], 0.0));
  }
  return heaviest;
}

// The lightest heaviest stage of all cuts, one by one.
double Best(const std::vector<double>& weights, std::size_t first, int stages) {
  if (stages == 1)
    return std::accumulate(weights.begin() + static_cast<std::ptrdiff_t>(first), weights.end(),
                           0.0);
  double best = std::numeric_limits<double>::infinity();
  double weight = 0;
  for (std::size_t end = first + 1; end + static_cast<std::size_t>(stages) - 1 <= weights.size();
       ++end) {
    weight += weights[end - 1];
    best = std::min(best, std::max(weight, Best(weights, end, stages - 1)));
  }
  return best;
}

TEST(PartitionTest, LayersOfTheSameWeightAreDividedEvenly) {
  EXPECT_EQ(Cut(std::vector<double>(7, 1), 3), (std::vector<int>{0, 3, 5, 7}));
  for (int layers = 1; layers <= 12; ++layers) {
    for (int stages = 1; stages <= layers; ++stages) {
      const std::vector<int> begins =
          Cut(std::vector<double>(static_cast<std::size_t>(layers), 1), stages);
      for (std::size_t s = 0; s + 1 < begins.size(); ++s) {
        EXPECT_GE(begins[s + 1] - begins[s], layers / stages);
        EXPECT_LE(begins[s + 1] - begins[s], (layers + stages - 1) / stages);
      }
    }
  }
}

TEST(PartitionTest, TheHeaviestStageIsAsLightAsItCanBe) {
  EXPECT_EQ(Cut({100, 1, 1, 1, 1, 100}, 3), (std::vector<int>{0, 1, 5, 6}));
  std::mt19937_64 random(tests::TestSeed());
  for (int i = 0; i < 200; ++i) {
    std::vector<double> weights(1 + random() % 9);
    for (double& weight : weights) weight = static_cast<double>(random() % 20);
    const int stages = 1 + static_cast<int>(random() % weights.size());
    const std::vector<int> begins = Cut(weights, stages);
    ASSERT_EQ(begins.size(), static_cast<std::size_t>(stages) + 1);
    ASSERT_EQ(begins.front(), 0);
    ASSERT_EQ(begins.back(), static_cast<int>(weights.size()));
    for (std::size_t s = 0; s + 1 < begins.size(); ++s) ASSERT_LT(begins[s], begins[s + 1]);
    ASSERT_EQ(Heaviest(weights, begins), Best(weights, 0, stages));
  }
}

TEST(PartitionTest, WhatCannotBeCutIsRefused) {
  EXPECT_EQ(Refusal({1, 1}, 3), "2 layers cannot be cut into 3 stages; use 1 to 2");
  EXPECT_EQ(Refusal({}, 1), "0 layers cannot be cut into 1 stages; give at least one layer");
  EXPECT_EQ(Refusal({1, -1}, 1), "layer 1 weighs -1.000000; allowed is 0 and above");
  EXPECT_NE(Refusal({std::numeric_limits<double>::quiet_NaN()}, 1), "");
}

TEST(PartitionTest, AWrongNameIsAnsweredByTheRightOnes) {
  PartitionKind kind = PartitionKind::kUniform;
  EXPECT_TRUE(ParsePartitionKind("time", &kind).ok());
  EXPECT_EQ(kind, PartitionKind::kTime);
  EXPECT_EQ(
      ParsePartitionKind("parameter", &kind).message(),
      "there is no partition \"parameter\"; allowed is uniform, parameters, time; the nearest "
      "known is parameters");
}

}  // namespace
}  // namespace sirtaki::parallel
