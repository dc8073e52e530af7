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
    RunTorchRanks(size, [&](int rank, const Session& session) {
      EXPECT_DOUBLE_EQ(metric_average(rank + 0.25, "loss", session), (size - 1) / 2.0 + 0.25);
      EXPECT_DOUBLE_EQ(metric_average(rank + 0.25, "", session), (size - 1) / 2.0 + 0.25);
      EXPECT_TRUE(std::isnan(metric_average(rank == 0 ? kNan : 1.0, "loss", session)));
    });
  }
}

TEST(MetricAverageTest, WeightsCountUnevenShares) {
  RunTorchRanks(3, [](int rank, const Session& session) {
    // 1 sample of value 10, 2 of 20, 3 of 30.
    EXPECT_DOUBLE_EQ(metric_average(10.0 * (rank + 1), rank + 1, "accuracy", session), 140.0 / 6);
    // A rank that saw nothing has no value.
    const double value = rank == 1 ? 0.0 / 0.0 : rank;
    EXPECT_DOUBLE_EQ(metric_average(value, rank == 1 ? 0 : 4, "accuracy", session), 1);
  });
}

// Of a literal, an int, a size and a float each is what it looks like.
TEST(MetricAverageTest, NamesAndWeightsAreToldApart) {
  RunTorchRanks(2, [](int rank, const Session& session) {
    const std::string name = "m";
    const std::size_t three = 3;
    EXPECT_DOUBLE_EQ(metric_average(rank, "m", session), 0.5);
    EXPECT_DOUBLE_EQ(metric_average(rank, name, session), 0.5);
    EXPECT_DOUBLE_EQ(metric_average(1.5f, name, session), 1.5);
    EXPECT_DOUBLE_EQ(metric_average(rank, rank, "m", session), 1);
    EXPECT_DOUBLE_EQ(metric_average(1.0 * rank, three, name, session), 0.5);
    EXPECT_DOUBLE_EQ(metric_average(rank, 0.5f, "m", session), 0.5);
  });
}

TEST(MetricAverageTest, WeightsThatAreNoneAreThrownOnAllRanks) {
  RunTorchRanks(2, [](int rank, const Session& session) {
    for (const double wrong : {-1.0, kNan, kInfinity}) {
      EXPECT_THAT(ErrorOf(ErrorCode::invalid_argument,
                          [&] { metric_average(1.0, rank == 1 ? wrong : 2.0, "loss", session); }),
                  AllOf(HasSubstr("\"loss\""), HasSubstr("rank 1: the weight is "),
                        HasSubstr("it must be a finite number, not negative")));
    }
    EXPECT_THAT(
        ErrorOf(ErrorCode::invalid_argument, [&] { metric_average(1.0, 0, "loss", session); }),
        HasSubstr("metric_average \"loss\": the weights of all ranks add up to 0;"));
    EXPECT_THAT(
        ErrorOf(ErrorCode::invalid_argument, [&] { metric_average(1.0, 1e308, "", session); }),
        HasSubstr("metric_average: the weights of all ranks add up to inf;"));
    EXPECT_DOUBLE_EQ(metric_average(1.0, 2, "loss", session), 1);
  });
}

TEST(MetricAverageTest, WeightsOnSomeRanksOnlyAreAMismatch) {
  RunTorchRanks(2, [](int rank, const Session& session) {
    ErrorOf(ErrorCode::mismatch, [&] {
      rank == 0 ? metric_average(1.0, "loss", session) : metric_average(1.0, 2, "loss", session);
    });
  });
}

TEST(MetricAverageTest, OfTensorsElementByElement) {
  RunTorchRanks(2, [](int rank, const Session& session) {
    const auto mine = torch::tensor({1.0f * rank, 3.0f}, torch::requires_grad());
    const auto average = metric_average(mine, "per class", session);
    EXPECT_TRUE(torch::equal(average, torch::tensor({0.5f, 3.0f})));
    EXPECT_EQ(mine[0].item<float>(), rank);
    EXPECT_FALSE(average.requires_grad());
    EXPECT_EQ(metric_average(torch::tensor(1.0 * rank), "", session).item<double>(), 0.5);
  });
}

TEST(MetricAverageTest, TensorsOfIntegersAreRefusedOnAllRanks) {
  RunTorchRanks(2, [](int rank, const Session& session) {
    const auto mine = rank == 0 ? torch::ones({2}, torch::kLong) : torch::ones({2});
    EXPECT_THAT(
        ErrorOf(ErrorCode::invalid_argument, [&] { metric_average(mine, "counts", session); }),
        AllOf(HasSubstr("rank 0: an average of int64 [2] would be truncated"),
              HasSubstr("convert it to a floating point type")));
    EXPECT_THAT(
        ErrorOf(ErrorCode::invalid_argument, [&] { metric_average(at::Tensor(), "t", session); }),
        HasSubstr("the tensor is undefined"));
  });
}

}  // namespace
}  // namespace sirtaki::tests
