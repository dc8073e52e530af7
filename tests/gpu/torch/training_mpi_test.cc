// RANKS: 1 2
// Training on real GPUs, of which there may be fewer than ranks, against one process that sees all
// batches. Skips with a reason where there is none.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tests/gpu/torch/gpu_rank.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;
using Options = DistributedOptimizerOptions;

constexpr int kSteps = 20;

class GpuTrainingTest : public GpuRankTest {};

Batch On(const torch::Device& device, const Batch& batch) {
  return {batch.x.to(device), batch.y.to(device)};
}

std::vector<torch::Tensor> OnHost(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> copies;
  for (const torch::Tensor& tensor : tensors) copies.push_back(tensor.detach().cpu());
  return copies;
}

SGD Momentum(std::vector<torch::Tensor> parameters) {
  return SGD(std::move(parameters), SGDOptions(0.05).momentum(0.9));
}

using Step = std::function<void(SmallNet&, DistributedOptimizer<SGD>&, int step)>;

// The parameters after kSteps steps of this rank.
std::vector<torch::Tensor> Train(const torch::Device& device, const Options& options,
                                 const Step& step) {
  SmallNet net;
  net.to(device);
  auto optimizer =
      DistributedOptimizer<SGD>(Momentum(net.parameters()), net.named_parameters(), options);
  for (int i = 0; i < kSteps; ++i) step(net, optimizer, i);
  return OnHost(net.parameters());
}

void PlainStep(const torch::Device& device, SmallNet& net, DistributedOptimizer<SGD>& optimizer,
               int step) {
  optimizer.zero_grad();
  Loss(net, On(device, BatchOfRank(step, rank()))).backward();
  optimizer.step();
}

TEST_F(GpuTrainingTest, RanksLearnWhatOneProcessLearnsFromTheJoinedBatch) {
  const auto ours = Train(device(), {}, [](SmallNet& net, auto& optimizer, int step) {
    PlainStep(device(), net, optimizer, step);
  });
  EXPECT_LT(Distance(ours, TrainAlone(Momentum, kSteps, size())), 1e-9);
}

TEST_F(GpuTrainingTest, InAnotherStreamAndWithKeptGradients) {
  const auto ours = Train(device(), {}, [](SmallNet& net, auto& optimizer, int step) {
    const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
    const c10::StreamGuard other(guard.getStreamFromGlobalPool(device()));
    optimizer.zero_grad(/*set_to_none=*/false);
    Loss(net, On(device(), BatchOfRank(step, rank()))).backward();
    clip_grad_norm_(optimizer, 1e9);
    optimizer.step();
    guard.synchronizeStream(other.current_stream());
  });
  EXPECT_LT(Distance(ours, TrainAlone(Momentum, kSteps, size())), 1e-9);
}

TEST_F(GpuTrainingTest, PassesAddUp) {
  const auto ours = Train(
      device(), Options().backward_passes_per_step(2),
      [](SmallNet& net, auto& optimizer, int step) {
        optimizer.zero_grad();
        const Batch batch = On(device(), BatchOfRank(step, rank()));
        for (const int first : {0, 2}) {
          (Loss(net, {batch.x.slice(0, first, first + 2), batch.y.slice(0, first, first + 2)}) / 2)
              .backward();
        }
        optimizer.step();
      });
  EXPECT_LT(Distance(ours, TrainAlone(Momentum, kSteps, size())), 1e-9);
}

// Adam's steps with shards are those without, in the types that NCCL scatters and in others.
TEST_F(GpuTrainingTest, ShardsLearnWhatWholeOptimizersLearn) {
  for (const auto type : {torch::kDouble, torch::kFloat, torch::kBFloat16}) {
    const auto train = [type](Shard shard) {
      SmallNet net;
      net.to(device(), type);
      auto optimizer = DistributedOptimizer<torch::optim::Adam>(
          torch::optim::Adam(net.parameters(), torch::optim::AdamOptions(0.01)),
          net.named_parameters(), Options().shard(shard));
      for (int step = 0; step < kSteps; ++step) {
        optimizer.zero_grad();
        const Batch batch = BatchOfRank(step, rank());
        Loss(net, {batch.x.to(device(), type), batch.y.to(device(), type)}).backward();
        clip_grad_norm_(optimizer, 0.5);
        optimizer.step();
      }
      return OnHost(net.parameters());
    };
    const auto whole = train(Shard::None);
    const double near = type == torch::kDouble ? 1e-9 : type == torch::kFloat ? 1e-4 : 5e-2;
    EXPECT_GT(Distance(whole, OnHost(SmallNet().parameters())), 1e-2) << "it learns";
    EXPECT_LT(Distance(whole, train(Shard::OptimizerState)), near) << torch::toString(type);
    EXPECT_LT(Distance(whole, train(Shard::Gradients)), near) << torch::toString(type);
  }
}

TEST_F(GpuTrainingTest, TheFirstLayerOnTheHost) {
  SmallNet net;
  net.output->to(device());
  auto optimizer = DistributedOptimizer<SGD>(Momentum(net.parameters()), net.named_parameters());
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const Batch batch = BatchOfRank(step, rank());
    const torch::Tensor hidden = torch::tanh(net.hidden(batch.x)).to(device());
    torch::mse_loss(net.output(hidden), batch.y.to(device())).backward();
    optimizer.step();
  }
  EXPECT_LT(Distance(OnHost(net.parameters()), TrainAlone(Momentum, kSteps, size())), 1e-9);
}

TEST_F(GpuTrainingTest, BackwardOfAModuleLeavesTheMean) {
  auto net = std::make_shared<SmallNet>();
  net->to(device());
  DistributedDataParallel<SmallNet> wrapped(net);
  SGD optimizer = Momentum(wrapped.parameters());
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const Batch batch = On(device(), BatchOfRank(step, rank()));
    torch::mse_loss(wrapped(batch.x), batch.y).backward();
    optimizer.step();
  }
  EXPECT_LT(Distance(OnHost(net->parameters()), TrainAlone(Momentum, kSteps, size())), 1e-9);
}

// The parameters after so many steps of many large layers, the same in each call. The host goes on
// while the device is still busy with the buckets, and memory comes and goes; unless it waits.
std::vector<torch::Tensor> TrainManyLarge(const torch::Device& device, int steps, bool wait) {
  constexpr int kLayers = 24;
  torch::manual_seed(7);
  torch::nn::ModuleList layers;
  for (int i = 0; i < kLayers; ++i) {
    layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(512, 512).bias(i % 2 == 0)));
  }
  layers->to(device);
  torch::manual_seed(8 + rank());
  const torch::Tensor batches = torch::randn({steps, 64, 512}).to(device);
  auto optimizer = DistributedOptimizer<SGD>(
      SGD(layers->parameters(), SGDOptions(0.01).momentum(0.9)), layers->named_parameters());
  const auto wait_if_wanted = [wait] {
    if (wait) torch::cuda::synchronize();
  };
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    torch::Tensor x = batches[step];
    for (const auto& layer : *layers) x = x + layer->as<torch::nn::Linear>()->forward(x).tanh();
    x.square().mean().backward();
    wait_if_wanted();
    optimizer.step();
    wait_if_wanted();
  }
  return OnHost(layers->parameters());
}

TEST_F(GpuTrainingTest, ManyLargeGradientsAllTheWayBehindTheHost) {
  const auto ahead = TrainManyLarge(device(), 30, /*wait=*/false);
  EXPECT_GT(Distance(ahead, TrainManyLarge(device(), 0, /*wait=*/false)), 1e-4) << "it learns";
  EXPECT_LT(Distance(ahead, TrainManyLarge(device(), 30, /*wait=*/true)), 1e-5);
  // All ranks have the same bits.
  for (const torch::Tensor& parameter : ahead) {
    EXPECT_TRUE(parameter.equal(broadcast(parameter, 0)));
  }
}

}  // namespace
}  // namespace sirtaki::tests
