// RANKS: 1 2 3
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <cstring>
#include <utility>
#include <vector>

#include "tests/torch/gradients/overlap.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

class TrainingTest : public testing::Test {
 protected:
  void SetUp() override { init(); }
  void TearDown() override { shutdown(); }
};

// Bit by bit, with rank 0's.
bool IdenticalOnAllRanks(const std::vector<torch::Tensor>& tensors) {
  std::int64_t differ = 0;
  for (const auto& tensor : tensors) {
    const auto mine = tensor.detach().contiguous();
    const auto of_root = broadcast(mine, 0);
    differ += std::memcmp(mine.data_ptr(), of_root.data_ptr(), mine.nbytes()) != 0;
  }
  return allreduce(torch::tensor(differ), AllreduceOptions().op(ReduceOp::Sum))
             .item<std::int64_t>() == 0;
}

template <class MakeOptimizer>
void ExpectFollowsOneProcess(const MakeOptimizer& make_optimizer, double tolerance) {
  constexpr int kSteps = 20;
  const auto expected = TrainAlone(make_optimizer, kSteps, size());
  SmallNet net;
  if (rank() != 0) {
    torch::NoGradGuard no_grad;
    for (auto& parameter : net.parameters()) parameter.fill_(rank());
  }
  auto optimizer = DistributedOptimizer(make_optimizer(net.parameters()), net.named_parameters());
  broadcast_parameters(net, 0);
  broadcast_optimizer_state(optimizer, 0);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    Loss(net, BatchOfRank(step, rank())).backward();
    optimizer.step();
  }
  EXPECT_LT(Distance(net.parameters(), expected), tolerance);
  EXPECT_TRUE(IdenticalOnAllRanks(net.parameters()));
}

TEST_F(TrainingTest, SgdWithMomentumFollowsOneProcess) {
  ExpectFollowsOneProcess(
      [](std::vector<torch::Tensor> p) {
        return torch::optim::SGD(std::move(p), torch::optim::SGDOptions(0.1).momentum(0.9));
      },
      1e-13);
}

TEST_F(TrainingTest, AdamFollowsOneProcess) {
  ExpectFollowsOneProcess(
      [](std::vector<torch::Tensor> p) {
        return torch::optim::Adam(std::move(p), torch::optim::AdamOptions(0.01));
      },
      1e-11);
}

TEST_F(TrainingTest, AGradientIsReducedWhileBackwardStillRuns) {
  if (size() == 1) GTEST_SKIP() << "one rank reduces nothing";
  EXPECT_TRUE(LastGradientIsReducedBeforeTheFirstExists(rank(), size(), [](const auto& names) {
    return DistributedOptimizer(torch::optim::SGD(names.values(), torch::optim::SGDOptions(0.1)),
                                names);
  }));
}

TEST_F(TrainingTest, AConvolutionalNetStaysIdentical) {
  torch::manual_seed(static_cast<std::uint64_t>(rank()));
  torch::nn::Sequential net(torch::nn::Conv2d(1, 8, 3), torch::nn::BatchNorm2d(8),
                            torch::nn::ReLU(), torch::nn::Flatten(), torch::nn::Linear(288, 10));
  auto optimizer =
      DistributedOptimizer(torch::optim::Adam(net->parameters(), torch::optim::AdamOptions(0.01)),
                           net->named_parameters());
  broadcast_parameters(*net, 0);
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    torch::cross_entropy_loss(net->forward(torch::randn({8, 1, 8, 8})),
                              torch::randint(10, {8}, torch::kLong))
        .backward();
    optimizer.step();
  }
  EXPECT_TRUE(IdenticalOnAllRanks(net->parameters()));
}

TEST_F(TrainingTest, ModelsThatDifferAreNamedOnEveryRank) {
  if (size() == 1) GTEST_SKIP() << "one rank has nobody to differ from";
  auto weight = torch::zeros({rank() == 0 ? 2 : 3}, torch::requires_grad());
  const NamedTensors names = {{"weight", weight}};
  try {
    DistributedOptimizer(torch::optim::SGD({weight}, torch::optim::SGDOptions(0.1)), names);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Mismatch);
    EXPECT_NE(std::string(error.what()).find("\"weight\" float32 [2] on rank 0"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace sirtaki::tests
