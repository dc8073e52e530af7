// Checkpoints of models on GPUs, which are fakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "sirtaki/torch.h"
#include "tests/torch/checkpoint/scratch_folder.h"
#include "tests/torch/gpu/gpu_ranks.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;

// Trains with noise of its device's generator.
struct TrainingRun {
  explicit TrainingRun(at::Device on)
      : device(on), net(3, 2), optimizer((net->to(on), net->parameters()), AdamOptions(0.1)) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : net->parameters()) {
      parameter.copy_(Waves(parameter.sizes(), 1).to(at::kFloat));
    }
  }

  void Step() {
    const at::Generator generator = at::globalContext().defaultGenerator(device);
    for (at::Tensor& parameter : net->parameters()) {
      parameter.mutable_grad() = torch::rand(parameter.sizes(), generator).to(device);
    }
    optimizer.step();
  }

  Checkpoint checkpoint() { return Checkpoint().model(*net).optimizer(optimizer); }

  at::Device device;
  torch::nn::Linear net;
  Adam optimizer;
};

class GpuCheckpointTest : public GpuRanksTest {};

TEST_F(GpuCheckpointTest, AResumedRunGoesOnAsTheOneThatWasNotStopped) {
  const ScratchFolder folder;
  RunRanks(2, [&](GpuRank& rank) {
    TrainingRun whole(Cuda(rank.device()));
    whole.Step();
    broadcast_parameters(*whole.net, 0);
    broadcast_optimizer_state(whole.optimizer, 0);
    save_checkpoint(folder.File("run.pt"), whole.checkpoint());
    whole.Step();

    TrainingRun resumed(Cuda(rank.device()));
    ASSERT_TRUE(load_checkpoint(folder.File("run.pt"), resumed.checkpoint()));
    resumed.Step();
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(resumed.net->parameters()[i].detach().cpu().equal(
          whole.net->parameters()[i].detach().cpu()))
          << "rank " << rank.number();
    }
  });
}

TEST_F(GpuCheckpointTest, AFileGoesFromTheCpuToGpusAndBack) {
  const ScratchFolder folder;
  const auto save_and_load = [&folder](at::Device device, const std::string& from,
                                       const std::string& to) {
    TrainingRun run(device);
    if (!from.empty()) {
      ASSERT_TRUE(load_checkpoint(folder.File(from), run.checkpoint()));
    }
    for (at::Tensor& parameter : run.net->parameters()) {
      parameter.mutable_grad() = torch::ones_like(parameter);
    }
    run.optimizer.step();
    save_checkpoint(folder.File(to), run.checkpoint());
  };
  RunTorchRanks(1, [&](int) { save_and_load(at::kCPU, "", "first.pt"); });
  RunRanks(1, [&](GpuRank& rank) { save_and_load(Cuda(rank.device()), "first.pt", "second.pt"); });
  RunTorchRanks(1, [&](int) {
    TrainingRun run(at::kCPU);
    ASSERT_TRUE(load_checkpoint(folder.File("second.pt"), run.checkpoint()));
    TrainingRun expected(at::kCPU);
    for (int step = 0; step < 2; ++step) {
      for (at::Tensor& parameter : expected.net->parameters()) {
        parameter.mutable_grad() = torch::ones_like(parameter);
      }
      expected.optimizer.step();
    }
    EXPECT_TRUE(run.net->weight.equal(expected.net->weight));
    const auto& state = static_cast<const torch::optim::AdamParamState&>(
        *run.optimizer.state().at(run.net->weight.unsafeGetTensorImpl()));
    EXPECT_EQ(state.step(), 2);
    EXPECT_TRUE(state.exp_avg().is_cpu());
  });
}

TEST_F(GpuCheckpointTest, ATensorComesToTheDeviceOfTheOneThatItReplaces) {
  const ScratchFolder folder;
  RunRanks(2, [&](GpuRank& rank) {
    const at::Device device = Cuda(rank.device());
    at::Tensor average = torch::full({3}, 5.0F).to(device);
    save_checkpoint(folder.File("run.pt"), Checkpoint().value("average", average));

    at::Tensor here = torch::zeros({2}).to(device);
    at::Tensor nothing;
    ASSERT_TRUE(load_checkpoint(folder.File("run.pt"), Checkpoint().value("average", here)));
    EXPECT_EQ(here.device(), device);
    EXPECT_TRUE(here.mul_(2).cpu().equal(torch::full({3}, 10.0F)));
    ASSERT_TRUE(load_checkpoint(folder.File("run.pt"), Checkpoint().value("average", nothing)));
    EXPECT_TRUE(nothing.is_cpu());
  });
}

TEST_F(GpuCheckpointTest, AModelOnAGpuHereAndOnTheHostThereIsAMismatch) {
  const ScratchFolder folder;
  RunRanks(2, [&](GpuRank& rank) {
    TrainingRun run(rank.number() == 0 ? Cuda(rank.device()) : at::Device(at::kCPU));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] { save_checkpoint(folder.File("run.pt"), run.checkpoint()); }),
                ::testing::HasSubstr("default of GPU 0"));
  });
}

}  // namespace
}  // namespace sirtaki::tests
