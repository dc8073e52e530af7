// RANKS: 1 2
// SyncBatchNorm, GradScaler, the state of optimizers and checkpoints on real GPUs, each against the
// CPU path of the same library. Skips with a reason where there is no GPU.
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu/torch/gpu_rank.h"

namespace sirtaki::tests {
namespace {

using torch::nn::BatchNormOptions;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr std::int64_t kChannels = 5;

class GpuTrainingPartsTest : public GpuRankTest {};

// Different on each rank, the same wherever it is used.
torch::Tensor Waves(torch::IntArrayRef shape, double phase) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return (torch::sin(torch::arange(count, torch::kDouble) * 1.7 + phase + 3 * rank()) + rank())
      .reshape(shape);
}

double Far(const torch::Tensor& a, const torch::Tensor& b) {
  if (!a.defined() && !b.defined()) return 0;
  if (a.sizes() != b.sizes()) return 1e300;
  if (a.numel() == 0) return 0;
  return (a.detach().cpu().to(torch::kDouble) - b.detach().to(torch::kDouble))
      .abs()
      .max()
      .item<double>();
}

struct NormCase {
  std::int64_t rows;
  std::vector<std::int64_t> rest;
  BatchNormOptions options = BatchNormOptions(kChannels);
  torch::MemoryFormat format = torch::MemoryFormat::Contiguous;
  torch::ScalarType type = torch::kFloat;
  torch::ScalarType module_type = torch::kFloat;
  double close = 1e-4;
};

void CompareNorms(const NormCase& c, torch::Device device) {
  SyncBatchNorm on_gpu(c.options);
  SyncBatchNorm on_host(c.options);
  on_gpu->to(device, c.module_type);
  on_host->to(torch::kDouble);
  for (int step = 0; step < 3; ++step) {
    std::vector<std::int64_t> shape = {c.rows, kChannels};
    shape.insert(shape.end(), c.rest.begin(), c.rest.end());
    const torch::Tensor values = Waves(shape, step).to(c.type);
    torch::Tensor x = values.to(device).contiguous(c.format).set_requires_grad(true);
    torch::Tensor exact = values.to(torch::kDouble).set_requires_grad(true);
    const torch::Tensor y = on_gpu->forward(x);
    const torch::Tensor expected = on_host->forward(exact);
    EXPECT_EQ(y.scalar_type(), c.type);
    EXPECT_TRUE(y.is_contiguous(c.format));
    EXPECT_LT(Far(y, expected), c.close);
    const torch::Tensor slope = Waves(shape, 50 + step).to(c.type);
    y.backward(slope.to(device));
    expected.backward(slope.to(torch::kDouble));
    EXPECT_LT(Far(x.grad(), exact.grad()), c.close);
    if (on_host->weight.defined()) {
      const double values_per_channel = static_cast<double>(values.numel()) / kChannels + 1;
      EXPECT_LT(Far(on_gpu->weight.grad(), on_host->weight.grad()), c.close * values_per_channel);
      EXPECT_LT(Far(on_gpu->bias.grad(), on_host->bias.grad()), c.close * values_per_channel);
    }
    EXPECT_LT(Far(on_gpu->running_mean, on_host->running_mean), c.close);
    EXPECT_LT(Far(on_gpu->running_var, on_host->running_var), c.close);
  }
}

TEST_F(GpuTrainingPartsTest, SyncBatchNormFollowsTheCpu) {
  const BatchNormOptions base(kChannels);
  const std::int64_t rows = 4 + 3 * rank();
  CompareNorms({rows, {}}, device_);
  CompareNorms({rows, {6}}, device_);
  CompareNorms({rows, {7, 9}}, device_);
  CompareNorms({rows, {2, 3, 4}}, device_);
  CompareNorms({rows, {7, 9}, base, torch::MemoryFormat::ChannelsLast}, device_);
  CompareNorms({rows, {2, 3, 4}, base, torch::MemoryFormat::ChannelsLast3d}, device_);
  CompareNorms({rank() == 1 ? 0 : 6, {7, 9}}, device_);
  for (const BatchNormOptions& options :
       {BatchNormOptions(base).affine(false), BatchNormOptions(base).eps(0.5).momentum(0.7),
        BatchNormOptions(base).momentum(std::nullopt),
        BatchNormOptions(base).track_running_stats(false),
        BatchNormOptions(base).momentum(std::nullopt).track_running_stats(false).affine(false)}) {
    CompareNorms({rows, {7, 9}, options}, device_);
  }
  NormCase exact{rows, {7, 9}};
  exact.type = exact.module_type = torch::kDouble;
  exact.close = 1e-10;
  CompareNorms(exact, device_);
}

TEST_F(GpuTrainingPartsTest, SyncBatchNormTakesHalfTypes) {
  for (const auto type : {torch::kHalf, torch::kBFloat16}) {
    for (const auto module_type : {torch::kFloat, type}) {
      if (size() == 1 && module_type == type) continue;  // LibTorch's own BatchNorm
      for (const auto format :
           {torch::MemoryFormat::Contiguous, torch::MemoryFormat::ChannelsLast}) {
        NormCase c{4 + 3 * rank(), {7, 9}, BatchNormOptions(kChannels), format};
        c.type = type;
        c.module_type = module_type;
        c.close = type == torch::kHalf ? 2e-2 : 1e-1;
        CompareNorms(c, device_);
      }
    }
  }
  // More values than float16 can count, and larger sums than it can hold.
  for (const auto type : {torch::kHalf, torch::kBFloat16}) {
    for (const auto format : {torch::MemoryFormat::Contiguous, torch::MemoryFormat::ChannelsLast}) {
      for (const bool affine : {false, true}) {
        NormCase many{2,
                      {300, 300},
                      BatchNormOptions(kChannels).track_running_stats(false).affine(affine),
                      format};
        many.type = type;
        many.close = type == torch::kHalf ? 2e-2 : 1e-1;
        CompareNorms(many, device_);
      }
    }
  }
}

TEST_F(GpuTrainingPartsTest, AnInfinityAnywhereSkipsTheStepEverywhere) {
  torch::Tensor weight = torch::zeros({1000}, torch::TensorOptions().device(device_));
  torch::Tensor exact =
      torch::zeros({10}, torch::TensorOptions().device(device_).dtype(torch::kDouble));
  torch::Tensor narrow =
      torch::zeros({10}, torch::TensorOptions().device(device_).dtype(torch::kBFloat16));
  weight.set_requires_grad(true);
  exact.set_requires_grad(true);
  narrow.set_requires_grad(true);
  SGD optimizer({weight, exact, narrow}, SGDOptions(1.0));
  GradScaler scaler(GradScalerOptions().init_scale(8));
  const auto step = [&](double value, bool clip) {
    weight.mutable_grad() = torch::ones_like(weight) * 8;
    exact.mutable_grad() = torch::full_like(exact, 8 * value * 1.1);
    narrow.mutable_grad() = torch::ones_like(narrow) * 8;
    if (clip) {
      scaler.unscale_(optimizer);
      EXPECT_NEAR(clip_grad_norm_(optimizer, 1e9), std::sqrt(1000 + 10 * 1.21 + 10), 1e-3);
    }
    const bool stepped = scaler.step(optimizer);
    scaler.update(8);
    return stepped;
  };
  EXPECT_TRUE(step(1, true));
  EXPECT_TRUE(step(1, false));
  EXPECT_FALSE(step(rank() == size() - 1 ? std::numeric_limits<double>::quiet_NaN() : 1, false));
  EXPECT_TRUE(step(1, false));
  EXPECT_TRUE(weight.detach().cpu().equal(torch::full({1000}, -3.0F)));
  EXPECT_TRUE(exact.detach().cpu().equal(torch::full({10}, -1.1, torch::kDouble) - 1.1 - 1.1));
  EXPECT_TRUE(narrow.detach().cpu().equal(torch::full({10}, -3, torch::kBFloat16)));
}

// Adam with noise of the device's generator.
struct TrainingRun {
  explicit TrainingRun(torch::Device on)
      : net(3, 2), optimizer((net->to(on), net->parameters()), AdamOptions(0.1)) {}
  void Step() {
    for (torch::Tensor& parameter : net->parameters()) {
      parameter.mutable_grad() = torch::rand_like(parameter);
    }
    optimizer.step();
  }
  Checkpoint checkpoint() { return Checkpoint().model(*net).optimizer(optimizer); }

  torch::nn::Linear net;
  Adam optimizer;
};

TEST_F(GpuTrainingPartsTest, AResumedRunGoesOnAsTheOneThatWasNotStopped) {
  const std::string path =
      (std::filesystem::temp_directory_path() /
       ("sirtaki_gpu_" + broadcast_object(std::to_string(getpid()), 0) + ".pt"))
          .string();
  torch::cuda::manual_seed(static_cast<std::uint64_t>(100 + rank()));
  TrainingRun whole(device_);
  if (rank() == 0) whole.Step();  // the others have no state
  broadcast_parameters(*whole.net, 0);
  broadcast_optimizer_state(whole.optimizer, 0);
  whole.Step();
  broadcast_parameters(*whole.net, 0);
  broadcast_optimizer_state(whole.optimizer, 0);
  save_checkpoint(path, whole.checkpoint());
  whole.Step();

  TrainingRun resumed(device_);
  ASSERT_TRUE(load_checkpoint(path, resumed.checkpoint()));
  resumed.Step();
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(resumed.net->parameters()[i].equal(whole.net->parameters()[i]));
  }
  barrier();
  if (rank() == 0) std::filesystem::remove(path);
}

}  // namespace
}  // namespace sirtaki::tests
