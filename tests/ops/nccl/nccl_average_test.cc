// Averages on GPUs: how exact they are, and which way of NCCL's they take.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/device_ranks.h"
#include "tests/support/fake_gpus_state.h"
#include "tests/support/half_reference.h"
#include "tests/support/rank_threads.h"
#include "tests/support/test_scale.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using nccl::DataType;
using nccl::RedOp;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using tests::DeviceRank;
using tests::FakeGpus;
using tests::RankThreads;
using tests::SmallFloat;
using Halves = std::vector<std::uint16_t>;

// Numbers in [1, 2), which a half type has all: every rank's are others.
Halves SomeHalves(const SmallFloat& format, std::int64_t count, int rank) {
  std::mt19937 random(static_cast<unsigned>(rank + 1));
  Halves numbers(static_cast<std::size_t>(count));
  for (std::uint16_t& number : numbers) {
    const auto steps = static_cast<int>(random() >> (32 - format.mantissa_bits));
    number = format.Encode(1 + std::ldexp(steps, -format.mantissa_bits));
  }
  return numbers;
}

// Averages over `size` ranks, as `tensors` tensors of `count` numbers that travel together; those
// of rank 0.
Halves Average(FakeGpus& gpus, const SmallFloat& format, int size, int tensors,
               std::int64_t count) {
  Halves result;
  InprocWorld world(size);
  RankThreads::Run(size, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    Halves values = SomeHalves(format, tensors * count, rank);
    core::RunBatch batch = SmallBatch(size);
    batch.limits.fusion_bytes = std::int64_t{64} << 20;
    for (int t = 0; t < tensors; ++t) {
      auto signature = std::make_shared<core::Signature>();
      signature->reduction = core::ReduceOp::kAverage;
      signature->device = core::DeviceKind::kCuda;
      signature->dtype = format.mantissa_bits == 7 ? DType::kBF16 : DType::kF16;
      signature->shape = {count};
      core::RunItem item{{.key = core::Key::Named(core::kWorldSet, std::to_string(t)),
                          .signature = std::move(signature)},
                         std::make_shared<core::Work>()};
      item.work->input = item.work->output = values.data() + t * count;
      item.work->handle = std::make_shared<core::HandleState>();
      batch.items.push_back(device.OnDevice(std::move(item)));
    }
    device.lanes().Start(std::move(batch), core::Clock::now());
    device.RunToIdle();
    EXPECT_TRUE(device.failure().ok()) << device.failure().ToString();
    if (rank == 0) result = std::move(values);
  });
  return result;
}

// The mean error, which is the bias, and the worst one are in units of the last place of what float64
// gives.
void ExpectExact(const SmallFloat& format, int size, const Halves& result) {
  std::vector<double> exact(result.size());
  for (int rank = 0; rank < size; ++rank) {
    const Halves given = SomeHalves(format, static_cast<std::int64_t>(result.size()), rank);
    for (std::size_t i = 0; i < exact.size(); ++i) exact[i] += format.Decode(given[i]) / size;
  }
  double sum = 0;
  double worst = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double unit = std::ldexp(1, -format.mantissa_bits);  // of all in [1, 2)
    const double error = (format.Decode(result[i]) - exact[i]) / unit;
    sum += error;
    worst = std::max(worst, std::fabs(error));
  }
  EXPECT_LT(std::fabs(sum / static_cast<double>(result.size())), 1.0 / 8);
  // Each of n - 1 additions may be wrong by half a unit, and the shares, which are n times smaller,
  // together by one.
  EXPECT_LE(worst, (size + 1) / 2.0);
}

TEST(NcclAverageTest, HalfTypesHaveNoBiasWhateverTheNumberOfRanks) {
  for (const SmallFloat& format : {tests::kBFloat16, tests::kFloat16}) {
    for (const int size : tests::SampleOf<int>(::testing::Values(2, 3, 4, 5, 6, 7, 8, 96))) {
      for (const int tensors : {1, 2}) {
        SCOPED_TRACE(std::to_string(size) + " ranks, tensors " + std::to_string(tensors) +
                     ", bits " + std::to_string(format.mantissa_bits));
        FakeGpus gpus;
        const std::int64_t count = (size > 8 ? 10000 : 140000) / tensors;
        ExpectExact(format, size, Average(gpus, format, size, tensors, count));
      }
    }
  }
}

TEST(NcclAverageTest, WhatIsCopiedAnywayIsSummed) {
  FakeGpus gpus;
  Average(gpus, tests::kBFloat16, 2, 2, 100);
  EXPECT_THAT(gpus.calls("ncclAllReduce"), AllOf(Not(IsEmpty()), Each(HasSubstr(" op 0"))));
  EXPECT_THAT(gpus.calls("path of ncclAllReduce"),
              AllOf(Not(IsEmpty()), Each(EndsWith(": nvls, copied"))));
}

TEST(NcclAverageTest, OneTensorWhoseShareIsExactNeedsNoKernel) {
  FakeGpus gpus;
  Average(gpus, tests::kBFloat16, 4, 1, 5000);
  EXPECT_THAT(gpus.calls("cuLaunchKernel"), IsEmpty());
  EXPECT_THAT(tests::WithoutConnecting(gpus.calls("ncclAllReduce")),
              AllOf(Not(IsEmpty()), Each(HasSubstr(" op 4"))));
  gpus.Forget();
  Average(gpus, tests::kBFloat16, 3, 1, 5000);
  EXPECT_EQ(gpus.calls("cuLaunchKernel").size(), 3u);
  EXPECT_THAT(gpus.calls("ncclAllReduce"), AllOf(Not(IsEmpty()), Each(HasSubstr(" op 0"))));
}

TEST(NcclAverageTest, TheWayThatNcclTakes) {
  using Call = tests::FakeAllReduce;
  const Call in_arena{.op = RedOp::kSum,
                      .type = DataType::kFloat32,
                      .in_place = true,
                      .in_window = true,
                      .registered = true,
                      .nvls = true,
                      .hosts = 1};
  const auto path = [&](auto change) {
    Call call = in_arena;
    change(call);
    return std::string(PathOfAllReduce(call));
  };
  EXPECT_EQ(path([](Call&) {}), "symmetric");
  EXPECT_EQ(path([](Call& c) { c.op = RedOp::kAvg; }), "ring, copied");
  EXPECT_EQ(path([](Call& c) { c.type = DataType::kFloat64; }), "nvls");
  EXPECT_EQ(path([](Call& c) { c.hosts = 2; }), "nvls");
  EXPECT_EQ(path([](Call& c) { c.in_window = false; }), "nvls");
  EXPECT_EQ(path([](Call& c) { c.in_window = c.registered = false; }), "nvls, copied");
  EXPECT_EQ(path([](Call& c) { c.in_window = c.nvls = false; }), "ring, copied");
  EXPECT_EQ(path([](Call& c) { c.in_window = c.nvls = c.in_place = false; }), "ring");
}

}  // namespace
}  // namespace sirtaki::ops
