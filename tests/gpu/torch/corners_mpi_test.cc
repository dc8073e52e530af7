// RANKS: 2
// Corners of training on real GPUs: random numbers that are drawn twice, stages in other places, memory
// formats, and hooks that must not wait. Skips with a reason where there is no GPU.
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/torch/gpu_rank.h"
#include "tests/torch/parallel/pipeline_training.h"

namespace sirtaki::tests {
namespace {

class GpuCornersTest : public GpuRankTest {};

torch::TensorOptions At(const torch::Device& device) {
  return torch::TensorOptions().device(device);
}

// ---- random numbers ----

TEST_F(GpuCornersTest, RecomputedDropoutOfAHostInputDropsTheSame) {
  const torch::Tensor weight = torch::ones({1000}, At(device()).requires_grad(true));
  const auto drop = [weight, gpu = device()](const torch::Tensor& x) {
    return torch::dropout(weight * x.to(gpu), 0.5, /*train=*/true);
  };
  const torch::Tensor output = recompute(drop, torch::ones({1000}));
  const torch::Tensor between = torch::rand({8}, At(device()));
  output.sum().backward();
  EXPECT_TRUE(weight.grad().equal(output.detach()));
  EXPECT_FALSE(torch::rand({8}, At(device())).equal(between)) << "draws are made again";
}

struct DrawnImpl : torch::nn::Module {
  explicit DrawnImpl(const torch::Device& device)
      : w(register_parameter("w", torch::randn({16}, At(device)))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x * w; }
  torch::Tensor w;
};

TEST_F(GpuCornersTest, WeighingLayersDrawsNothingOnTheGpu) {
  const auto first_of = [](const std::string& partition) {
    torch::manual_seed(3);
    const std::vector<PipelineFactory> layers(static_cast<std::size_t>(size()), [] {
      return PipelineStage(std::make_shared<DrawnImpl>(device()));
    });
    PipelineOptions options = PipelineOptions().partition(partition);
    if (partition == "time") options.sample(torch::ones({2, 16}, At(device())));
    const Pipeline pipeline(layers, torch::nn::MSELoss(), options);
    return pipeline.parameters()[0].detach().cpu();
  };
  const torch::Tensor expected = first_of("uniform");
  EXPECT_TRUE(first_of("parameters").equal(expected));
  EXPECT_TRUE(first_of("time").equal(expected));
}

// ---- what travels between stages ----

// A convolution that hands its result over in a memory format.
struct FormatImpl : torch::nn::Module {
  explicit FormatImpl(at::MemoryFormat format) : format(format) {}
  torch::Tensor forward(const torch::Tensor& x) {
    arrived.push_back(x.is_contiguous(format));
    torch::Tensor y = conv->forward(x).contiguous(format);
    y.register_hook([this](const torch::Tensor& gradient) {
      came_back.push_back(gradient.is_contiguous(format));
    });
    return y;
  }
  torch::nn::Conv2d conv =
      register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3).padding(1)));
  at::MemoryFormat format;
  std::vector<bool> arrived;
  std::vector<bool> came_back;
};

TEST_F(GpuCornersTest, ActivationsAndGradientsKeepTheirFormat) {
  std::vector<double> losses;
  std::vector<torch::Tensor> gradients;
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    std::shared_ptr<FormatImpl> mine;
    std::vector<PipelineFactory> factories;
    for (int stage = 0; stage < size(); ++stage) {
      factories.emplace_back([&mine, format, stage] {
        torch::manual_seed(static_cast<std::uint64_t>(stage));
        mine = std::make_shared<FormatImpl>(format);
        return PipelineStage(mine);
      });
    }
    Pipeline pipeline(factories, torch::nn::MSELoss(), PipelineOptions().micro_batches(2));
    pipeline.to(device(), torch::kDouble);
    torch::manual_seed(9);
    const torch::Tensor batch =
        torch::randn({4, 4, 6, 5}).to(device(), torch::kDouble).contiguous(format);
    losses.push_back(pipeline.train_batch(batch, batch.roll(1)));
    gradients.push_back(pipeline.parameters()[0].grad().cpu());
    EXPECT_EQ(mine->arrived, std::vector<bool>(2, true));
    if (!pipeline.is_last()) {
      EXPECT_EQ(mine->came_back, std::vector<bool>(2, true));
    }
  }
  EXPECT_NEAR(losses[0], losses[1], 1e-9);
  EXPECT_TRUE(torch::allclose(gradients[0], gradients[1], 1e-6, 1e-9));
}

// One stage is on the GPU and the other one on the CPU.
TEST_F(GpuCornersTest, AStageOnTheHostTrainsBesideOneOnTheGpu) {
  for (int on_gpu = 0; on_gpu < size(); ++on_gpu) {
    pipelines::Model model;
    model.width = 32;
    model.stages = size();
    const pipelines::Whole whole(model);
    const torch::Tensor input = model.Input();
    const torch::Tensor target = model.Target();
    const double loss = whole.Train(input, target);
    std::vector<PipelineFactory> factories;
    for (int stage = 0; stage < size(); ++stage) {
      factories.emplace_back([&model, on_gpu, stage] {
        const auto module = model.Make(stage);
        if (stage != on_gpu) return PipelineStage(module);
        module->to(device());
        const auto forward = [module](std::vector<torch::Tensor> inputs) {
          for (torch::Tensor& tensor : inputs) tensor = tensor.to(device());
          return module->forward(inputs);
        };
        return PipelineStage(forward, module);
      });
    }
    Pipeline pipeline(factories, pipelines::Loss, model.Options());
    const bool ends_on_gpu = on_gpu == size() - 1;
    EXPECT_NEAR(pipeline.train_batch(input, ends_on_gpu ? target.to(device()) : target), loss,
                1e-5);
    for (const auto& parameter : pipeline.named_parameters()) {
      EXPECT_TRUE(torch::allclose(parameter.value().grad().cpu(),
                                  whole.Parameter(parameter.key()).grad(), 1e-3, 1e-5))
          << parameter.key() << " with stage " << on_gpu << " on the GPU";
    }
  }
}

// ---- saving, clipping ----

TEST_F(GpuCornersTest, TheWholeStateGoesToTheHost) {
  torch::manual_seed(2);
  torch::nn::Linear whole(6, 8);
  torch::manual_seed(2);
  ColumnParallelLinear column(ColumnParallelLinearOptions(6, 8));
  column->to(device());
  const auto state = whole_state(*column, at::kCPU);
  for (const auto& item : whole->named_parameters()) {
    EXPECT_TRUE(state[item.key()].equal(item.value())) << item.key();
  }
}

// A hundred gradients on the GPU, some of them without elements, and on the host in double.
struct ManyGradients {
  explicit ManyGradients(const torch::Device& device, bool mixed) {
    for (int i = 0; i < 100; ++i) {
      const auto other = i % 10 == 0 ? torch::kDouble : torch::kBFloat16;
      const auto type = mixed && i % 5 == 0 ? other : torch::kFloat;
      gradients.push_back(torch::randn({i % 9, 3}).to(type));
      parameters.push_back(torch::zeros({i % 9, 3}, At(device).dtype(type)));
      parameters.back().mutable_grad() = gradients.back().to(device);
    }
  }
  double Norm(double type) const {
    double sum = 0;
    double most = 0;
    for (const torch::Tensor& gradient : gradients) {
      if (gradient.numel() == 0) continue;
      const torch::Tensor values = gradient.to(torch::kDouble).abs();
      sum += values.pow(type).sum().item<double>();
      most = std::max(most, values.max().item<double>());
    }
    return std::isinf(type) ? most : std::pow(sum, 1 / type);
  }
  std::vector<torch::Tensor> parameters;
  std::vector<torch::Tensor> gradients;
};

TEST_F(GpuCornersTest, ClippingKnowsTheNormOfManyGradients) {
  torch::manual_seed(4);
  for (const bool mixed : {false, true}) {
    const ManyGradients many(device(), mixed);
    torch::optim::SGD optimizer(many.parameters, 0.1);
    for (const double type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      EXPECT_NEAR(clip_grad_norm_(optimizer, 1e9, type) / many.Norm(type), 1, 1e-3)
          << type << (mixed ? ", of several types" : "");
    }
  }
}

// ---- hooks ----

// While a rank is late with its backward pass, the other's launches all of it.
TEST_F(GpuCornersTest, HooksOfShardedGradientsDoNotWaitForALateRank) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kLate = std::chrono::milliseconds(1500);
  constexpr int kLayers = 16;  // of 16 MB each, which is far more than a bucket
  torch::nn::Sequential net;
  for (int i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(2048, 2048));
  net->to(device());
  auto optimizer = DistributedOptimizer(
      torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.01)), net->named_parameters(),
      DistributedOptimizerOptions().shard(Shard::Gradients));
  Clock::duration launched{};
  for (int step = 0; step < 4; ++step) {
    const torch::Tensor x = torch::ones({16, 2048}, At(device()).requires_grad(true));
    const torch::Tensor loss = net->forward(x).square().mean();
    torch::cuda::synchronize();
    barrier();
    // The rank is late on purpose, by more than all hooks of the other would wait.
    if (step == 3 && rank() == 1) std::this_thread::sleep_for(kLate);
    const auto begin = Clock::now();
    x.register_hook([&](const torch::Tensor&) { launched = Clock::now() - begin; });
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  if (rank() == 0) {
    EXPECT_LT(std::chrono::duration_cast<std::chrono::milliseconds>(launched).count(), 200);
  }
}

}  // namespace
}  // namespace sirtaki::tests
