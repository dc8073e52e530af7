// GradScaler with gradients on GPUs, which are fakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <barrier>
#include <limits>
#include <thread>
#include <vector>

#include "frameworks/torch/gradients/gradient_unscaling.h"
#include "sirtaki/torch.h"
#include "tests/torch/gpu/gpu_ranks.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class GpuGradScalerTest : public GpuRanksTest {};

at::Tensor Weight(at::Device device, at::ScalarType type = at::kFloat) {
  return torch::zeros({2}, type).to(device).set_requires_grad(true);
}

void SetGradient(at::Tensor& weight, double value) {
  weight.mutable_grad() = torch::full({2}, value, weight.scalar_type()).to(weight.device());
}

double First(const at::Tensor& tensor) { return tensor.detach().cpu()[0].item<double>(); }

GradScalerOptions Small() { return GradScalerOptions().init_scale(8).growth_interval(2); }

TEST_F(GpuGradScalerTest, AnInfinityAnywhereSkipsTheStepEverywhere) {
  RunRanks(2, [](GpuRank& rank) {
    // The weights are of all types, on two GPUs, and on the CPU.
    std::vector<at::Tensor> weights = {
        Weight(Cuda(rank.device())), Weight(at::kCPU), Weight(Cuda(rank.device()), at::kDouble),
        Weight(Cuda(rank.device() + 2)), Weight(Cuda(rank.device()), at::kBFloat16)};
    SGD optimizer(weights, SGDOptions(1.0));
    GradScaler scaler(Small());
    for (std::size_t bad = 0; bad < weights.size(); ++bad) {
      for (at::Tensor& weight : weights) SetGradient(weight, 4);
      if (rank.number() == 1) SetGradient(weights[bad], kInfinity);
      const double before = First(weights[0]);
      EXPECT_FALSE(scaler.step(optimizer));
      EXPECT_EQ(First(weights[0]), before);
      scaler.update(8);

      for (at::Tensor& weight : weights) SetGradient(weight, 4 + bad);
      scaler.unscale_(optimizer);
      for (const at::Tensor& weight : weights) {
        EXPECT_EQ(First(weight.grad()), (4 + static_cast<double>(bad)) / 8);
      }
      EXPECT_TRUE(scaler.step(optimizer));
      EXPECT_EQ(First(weights[3]), before - (4 + static_cast<double>(bad)) / 8);
      scaler.update(8);
    }
  });
}

TEST_F(GpuGradScalerTest, TheScaleFollowsAsOnTheCpu) {
  RunRanks(2, [](GpuRank& rank) {
    at::Tensor weight = Weight(Cuda(rank.device()));
    SGD optimizer({weight}, SGDOptions(1.0));
    GradScaler scaler(Small());
    std::vector<double> scales;
    for (const float gradient : {1.0F, 1.0F, kInfinity, 1.0F, 1.0F}) {
      // A rank without a gradient takes part.
      weight.mutable_grad().reset();
      if (rank.number() == 0) SetGradient(weight, gradient);
      scaler.step(optimizer);
      scaler.update();
      scales.push_back(scaler.get_scale());
    }
    EXPECT_EQ(scales, std::vector<double>({8, 16, 8, 8, 16}));
  });
}

TEST_F(GpuGradScalerTest, IsAskedForOnceAStepAndNotByUnscaling) {
  RunRanks(1, [](GpuRank& rank) {
    at::Tensor weight = Weight(Cuda(rank.device()));
    SGD optimizer({weight}, SGDOptions(1.0));
    GradScaler scaler(Small());
    SetGradient(weight, 1);
    const int before = ReadBacks(Cuda(rank.device()));
    scaler.unscale_(optimizer);
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
    EXPECT_EQ(ReadBacks(Cuda(rank.device())), before)
        << "but for the flag, which is copied behind the program's back";
  });
}

TEST_F(GpuGradScalerTest, AFlagIsWaitedForWhereItIsAskedFor) {
  const at::Device device = Cuda(1);
  const auto stream = gpus_.MakeStream();
  SetCurrentStream(1, stream);
  for (const float value : {0.0F, 1.0F}) {
    const at::Tensor flag = torch::full({1}, value).to(device);
    WaitForStream(device);
    std::atomic<bool> open{false};
    gpus_.PutGate(stream, open);
    detail::LateFlag late(flag);
    std::atomic<bool> later{false};
    gpus_.PutGate(stream, later);  // what comes behind it is not waited for
    std::thread opener([&open] { open = true; });
    EXPECT_EQ(late.Get(), value != 0);
    opener.join();
    EXPECT_TRUE(open);
    later = true;
    WaitForStream(device);
  }
}

TEST_F(GpuGradScalerTest, AFlagMakesNoContextWhereItsThreadIs) {
  std::thread([] {
    const at::Tensor flag = torch::zeros({1}, Cuda(1));
    EXPECT_FALSE(detail::LateFlag(flag).Get());
  }).join();
  EXPECT_THAT(gpus_.devices_with_context(), ::testing::ElementsAre(1));
}

TEST_F(GpuGradScalerTest, WhatFailsOnOneRankIsToldToAll) {
  std::barrier both(2);
  RunRanks(2, [&both](GpuRank& rank) {
    at::Tensor weight = Weight(Cuda(rank.device()));
    SGD optimizer({weight}, SGDOptions(1.0));
    GradScaler scaler(Small());
    SetGradient(weight, 1);
    both.arrive_and_wait();
    if (rank.number() == 1) FailNextAllocation("no memory on this GPU");
    const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] { scaler.step(optimizer); });
    EXPECT_THAT(text, ::testing::HasSubstr("cannot be unscaled: no memory on this GPU"));
    EXPECT_TRUE(scaler.step(optimizer));
  });
}

TEST_F(GpuGradScalerTest, AGpuHereAndTheHostThereIsAMismatch) {
  RunRanks(2, [](GpuRank& rank) {
    at::Tensor weight = Weight(rank.number() == 0 ? Cuda(rank.device()) : at::Device(at::kCPU));
    SGD optimizer({weight}, SGDOptions(1.0));
    GradScaler scaler(Small());
    SetGradient(weight, 1);
    const auto text = ErrorOf(ErrorCode::Mismatch, [&] { scaler.step(optimizer); });
    EXPECT_THAT(text, ::testing::HasSubstr("on a GPU on rank 0"));
    EXPECT_THAT(text, ::testing::HasSubstr("on the host on rank 1"));
  });
}

}  // namespace
}  // namespace sirtaki::tests
