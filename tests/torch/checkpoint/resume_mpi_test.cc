// RANKS: 1 2 3
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "tests/torch/checkpoint/scratch_folder.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

class ResumeTest : public testing::Test {
 protected:
  void SetUp() override { init(); }
  void TearDown() override { shutdown(); }
};

constexpr std::int64_t kSamples = 50;

// With LibTorch's own dropout, which draws from the process's generator.
struct TrainingRun {
  TrainingRun() {
    broadcast_parameters(*net, 0);
    broadcast_optimizer_state(optimizer, 0);
  }

  Checkpoint checkpoint() {
    return Checkpoint()
        .model(*net)
        .optimizer(optimizer)
        .scheduler(scheduler)
        .sampler(sampler)
        .epoch(epoch);
  }

  void TrainUntil(std::int64_t epochs) {
    const auto x = Waves({kSamples, 6}, 1).to(torch::kFloat);
    const auto y = Waves({kSamples, 2}, 2).to(torch::kFloat);
    for (; epoch < epochs; ++epoch) {
      sampler.set_epoch(static_cast<std::size_t>(epoch));
      while (const auto batch = sampler.next(4)) {
        const auto rows = torch::tensor(std::vector<std::int64_t>(batch->begin(), batch->end()));
        optimizer.zero_grad();
        torch::mse_loss(net->forward(x.index_select(0, rows)), y.index_select(0, rows)).backward();
        optimizer.step();
      }
      scheduler.step();
    }
  }

  torch::nn::Sequential net{torch::nn::Linear(6, 16), torch::nn::Tanh(), torch::nn::Dropout(0.3),
                            torch::nn::Linear(16, 2)};
  DistributedOptimizer<torch::optim::Adam> optimizer{
      torch::optim::Adam(net->parameters(), torch::optim::AdamOptions(0.02)),
      net->named_parameters()};
  torch::optim::StepLR scheduler{optimizer, 2, 0.5};
  DistributedSampler sampler{kSamples, DistributedSamplerOptions().seed(3)};
  std::int64_t epoch = 0;
};

std::vector<torch::Tensor> Copy(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

TEST_F(ResumeTest, BitByBitAsIfItHadNotBeenStopped) {
  // Each process has a folder of its own: only rank 0 finds a file in its.
  const ScratchFolder folder;
  seed_all(11);
  TrainingRun whole;
  whole.TrainUntil(7);
  const auto expected = Copy(whole.net->parameters());
  const auto next_numbers = torch::rand({4});

  seed_all(11);
  {
    TrainingRun first;
    first.TrainUntil(3);
    save_checkpoint(folder.File("run.pt"), first.checkpoint());
    first.TrainUntil(4);
  }
  EXPECT_EQ(std::filesystem::exists(folder.File("run.pt")), rank() == 0);
  seed_all(12);
  TrainingRun resumed;
  ASSERT_TRUE(load_checkpoint(folder.File("run.pt"), resumed.checkpoint()));
  EXPECT_EQ(resumed.epoch, 3);
  resumed.TrainUntil(7);
  EXPECT_EQ(Distance(Copy(resumed.net->parameters()), expected), 0);
  EXPECT_TRUE(torch::equal(torch::rand({4}), next_numbers));
}

TEST_F(ResumeTest, SeedAllSeedsLibTorch) {
  const auto of_all = [](SeedMode mode) {
    const auto used = seed_all(5, mode);
    const auto drawn = torch::rand({1, 3});
    torch::manual_seed(used);
    EXPECT_TRUE(torch::equal(torch::rand({1, 3}), drawn));
    return allgather(drawn);
  };
  const auto equal = of_all(SeedMode::EqualOnAllRanks);
  const auto different = of_all(SeedMode::DifferentPerRank);
  torch::manual_seed(5);
  EXPECT_TRUE(torch::equal(torch::rand({1, 3}), equal[0].unsqueeze(0)));
  for (int rank = 1; rank < size(); ++rank) {
    EXPECT_TRUE(torch::equal(equal[rank], equal[0]));
    EXPECT_FALSE(torch::equal(different[rank], different[0]));
  }
}

}  // namespace
}  // namespace sirtaki::tests
