#include "sirtaki/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstddef>
#include <limits>

#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(MetricAverageTest, IsTheMeanOverTheRanks) {
  for (const int size : {1, 2, 3}) {
    RunTorchRanks(size, [&](int rank) {
      EXPECT_DOUBLE_EQ(metric_average(rank + 0.25, "loss"), (size - 1) / 2.0 + 0.25);
      EXPECT_DOUBLE_EQ(metric_average(rank + 0.25, ""), (size - 1) / 2.0 + 0.25);
      EXPECT_TRUE(std::isnan(metric_average(rank == 0 ? kNan : 1.0, "loss")));
    });
  }
}

TEST(MetricAverageTest, WeightsCountUnevenShares) {
  RunTorchRanks(3, [](int rank) {
    // 1 sample of value 10, 2 of 20, 3 of 30.
    EXPECT_DOUBLE_EQ(metric_average(10.0 * (rank + 1), rank + 1, "accuracy"), 140.0 / 6);
    // A rank that saw nothing has no value.
    const double value = rank == 1 ? 0.0 / 0.0 : rank;
    EXPECT_DOUBLE_EQ(metric_average(value, rank == 1 ? 0 : 4, "accuracy"), 1);
  });
}

// A literal, an int, a size and a float are what they look like.
TEST(MetricAverageTest, NamesAndWeightsAreToldApart) {
  RunTorchRanks(2, [](int rank) {
    const std::string name = "m";
    const std::size_t three = 3;
    EXPECT_DOUBLE_EQ(metric_average(rank, "m"), 0.5);
    EXPECT_DOUBLE_EQ(metric_average(rank, name), 0.5);
    EXPECT_DOUBLE_EQ(metric_average(1.5f, name), 1.5);
    EXPECT_DOUBLE_EQ(metric_average(rank, rank, "m"), 1);
    EXPECT_DOUBLE_EQ(metric_average(1.0 * rank, three, name), 0.5);
    EXPECT_DOUBLE_EQ(metric_average(rank, 0.5f, "m"), 0.5);
  });
}

TEST(MetricAverageTest, WeightsThatAreNoneAreThrownOnAllRanks) {
  RunTorchRanks(2, [](int rank) {
    for (const double wrong : {-1.0, kNan, kInfinity}) {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                          [&] { metric_average(1.0, rank == 1 ? wrong : 2.0, "loss"); }),
                  AllOf(HasSubstr("\"loss\""), HasSubstr("rank 1: the weight is "),
                        HasSubstr("it must be a finite number, not negative")));
    }
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { metric_average(1.0, 0, "loss"); }),
                HasSubstr("metric_average \"loss\": the weights of all ranks add up to 0;"));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { metric_average(1.0, 1e308, ""); }),
                HasSubstr("metric_average: the weights of all ranks add up to inf;"));
    EXPECT_DOUBLE_EQ(metric_average(1.0, 2, "loss"), 1);
  });
}

TEST(MetricAverageTest, WeightsOnSomeRanksOnlyAreAMismatch) {
  RunTorchRanks(2, [](int rank) {
    ErrorOf(ErrorCode::Mismatch,
            [&] { rank == 0 ? metric_average(1.0, "loss") : metric_average(1.0, 2, "loss"); });
  });
}

TEST(MetricAverageTest, OfTensorsElementByElement) {
  RunTorchRanks(2, [](int rank) {
    const auto mine = torch::tensor({1.0f * rank, 3.0f}, torch::requires_grad());
    const auto average = metric_average(mine, "per class");
    EXPECT_TRUE(torch::equal(average, torch::tensor({0.5f, 3.0f})));
    EXPECT_EQ(mine[0].item<float>(), rank);
    EXPECT_FALSE(average.requires_grad());
    EXPECT_EQ(metric_average(torch::tensor(1.0 * rank), "").item<double>(), 0.5);
  });
}

TEST(MetricAverageTest, TensorsOfIntegersAreRefusedOnAllRanks) {
  RunTorchRanks(2, [](int rank) {
    const auto mine = rank == 0 ? torch::ones({2}, torch::kLong) : torch::ones({2});
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { metric_average(mine, "counts"); }),
                AllOf(HasSubstr("rank 0: an average of int64 [2] would be truncated"),
                      HasSubstr("convert it to a floating point type")));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { metric_average(at::Tensor(), "t"); }),
                HasSubstr("the tensor is undefined"));
  });
}

}  // namespace
}  // namespace sirtaki::tests
