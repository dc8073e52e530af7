#include "sirtaki/broadcast.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "sirtaki/optimizer.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;

struct WithBuffers : torch::nn::Module {
  explicit WithBuffers(double value) : norm(torch::nn::BatchNorm1dOptions(3)) {
    register_module("norm", norm);
    weight = register_parameter("weight", torch::full({2, 3}, value).t());  // not contiguous
    steps = register_buffer("steps", torch::tensor(static_cast<std::int64_t>(value)));
    torch::NoGradGuard no_grad;
    norm->running_mean.fill_(value);
    norm->weight.fill_(value);
  }
  torch::nn::BatchNorm1d norm;
  torch::Tensor weight;
  torch::Tensor steps;
};

TEST(BroadcastParametersTest, GivesParametersAndBuffersOfAModule) {
  RunTorchRanks(3, [](int rank, const Session& session) {
    WithBuffers net(rank + 10);
    broadcast_parameters(net, 1, session);
    EXPECT_TRUE(torch::equal(net.weight.detach(), torch::full({3, 2}, 11.0f)));
    EXPECT_TRUE(net.weight.requires_grad() && net.weight.is_leaf());
    EXPECT_EQ(net.steps.item<std::int64_t>(), 11);
    EXPECT_TRUE(torch::equal(net.norm->running_mean, torch::full({3}, 11.0f)));
    EXPECT_TRUE(torch::equal(net.norm->weight.detach(), torch::full({3}, 11.0f)));
  });
}

TEST(BroadcastParametersTest, TakesDictionariesAndLists) {
  RunTorchRanks(2, [](int rank, const Session& session) {
    SmallNet net;
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : net.parameters()) parameter.fill_(rank);
    }
    broadcast_parameters(net.named_parameters(), 1, session);
    for (const auto& parameter : net.parameters()) {
      EXPECT_TRUE(torch::equal(parameter.detach(), torch::ones_like(parameter)));
    }
    std::vector<torch::Tensor> tensors = {torch::full({2}, rank), torch::full({}, rank)};
    broadcast_parameters(tensors, 0, session);
    EXPECT_EQ(tensors[0].sum().item<std::int64_t>() + tensors[1].item<std::int64_t>(), 0);
  });
}

TEST(BroadcastParametersTest, ModelsThatDifferAreRefusedAndUntouched) {
  RunTorchRanks(2, [](int rank, const Session& session) {
    std::vector<torch::Tensor> tensors = {torch::full({2}, rank),
                                          torch::full({rank == 0 ? 3 : 4}, rank)};
    const auto text =
        ErrorOf(ErrorCode::mismatch, [&] { broadcast_parameters(tensors, 0, session); });
    EXPECT_THAT(text, AllOf(HasSubstr("\"tensor 1\" int64 [3] on rank 0"),
                            HasSubstr("\"tensor 1\" int64 [4] on rank 1")));
    EXPECT_EQ(tensors[0].sum().item<std::int64_t>(), 2 * rank);
  });
}

TEST(BroadcastParametersTest, RootsThatDifferOrDoNotExistAreRefused) {
  RunTorchRanks(2, [](int rank, const Session& session) {
    const std::vector<torch::Tensor> tensors = {torch::ones({2})};
    EXPECT_THAT(ErrorOf(ErrorCode::mismatch, [&] { broadcast_parameters(tensors, rank, session); }),
                AllOf(HasSubstr("root rank 0 on rank 0"), HasSubstr("root rank 1 on rank 1")));
    EXPECT_THAT(
        ErrorOf(ErrorCode::invalid_argument, [&] { broadcast_parameters(tensors, 2, session); }),
        HasSubstr("root rank 2 of a job of 2"));
  });
}

// Rank 0 has trained, the others have not; afterwards all take the same step from the same state.
template <class MakeOptimizer>
void ExpectStateTravels(const MakeOptimizer& make_optimizer) {
  constexpr int kSize = 3;
  std::vector<std::vector<torch::Tensor>> of_rank(kSize);
  std::vector<double> lr_of_rank(kSize);
  RunTorchRanks(kSize, [&](int rank, const Session& session) {
    const auto index = static_cast<std::size_t>(rank);
    SmallNet net;
    auto optimizer = make_optimizer(net.parameters());
    const auto step = [&](int number) {
      optimizer.zero_grad();
      Loss(net, BatchOfRank(number, 0)).backward();
      optimizer.step();
    };
    if (rank == 0) {
      for (int i = 0; i < 3; ++i) step(i);
      optimizer.param_groups()[0].options().set_lr(0.03);
    }
    if (rank == 2) step(7);  // state that must go
    broadcast_parameters(net, 0, session);
    broadcast_optimizer_state(optimizer, 0, session);
    lr_of_rank[index] = optimizer.param_groups()[0].options().get_lr();
    for (int i = 3; i < 6; ++i) step(i);
    of_rank[index] = net.parameters();
  });
  for (std::size_t rank = 0; rank < kSize; ++rank) {
    EXPECT_DOUBLE_EQ(lr_of_rank[rank], 0.03) << rank;
    EXPECT_EQ(Distance(of_rank[0], of_rank[rank]), 0) << rank;
  }
}

TEST(BroadcastOptimizerStateTest, SgdMomentum) {
  ExpectStateTravels([](std::vector<torch::Tensor> p) {
    return torch::optim::SGD(std::move(p), torch::optim::SGDOptions(0.1).momentum(0.9));
  });
}

TEST(BroadcastOptimizerStateTest, AdamStepsAndMoments) {
  ExpectStateTravels([](std::vector<torch::Tensor> p) {
    return torch::optim::Adam(std::move(p), torch::optim::AdamOptions(0.1).amsgrad(true));
  });
}

TEST(BroadcastOptimizerStateTest, OtherOptimizers) {
  ExpectStateTravels([](std::vector<torch::Tensor> p) {
    return torch::optim::RMSprop(std::move(p), torch::optim::RMSpropOptions(0.1).momentum(0.5));
  });
  ExpectStateTravels([](std::vector<torch::Tensor> p) {
    return torch::optim::Adagrad(std::move(p), torch::optim::AdagradOptions(0.1));
  });
}

TEST(BroadcastOptimizerStateTest, StateThatOnlyAnotherRankHasIsDropped) {
  RunTorchRanks(2, [](int rank, const Session& session) {
    SmallNet net;
    torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    if (rank == 1) {
      Loss(net, BatchOfRank(0, 0)).backward();
      sgd.step();
      EXPECT_FALSE(sgd.state().empty());
    }
    auto optimizer = DistributedOptimizer(std::move(sgd), net.named_parameters(), {}, session);
    broadcast_optimizer_state(optimizer, 0, session);
    EXPECT_TRUE(optimizer.state().empty());
  });
}

TEST(BroadcastOptimizerStateTest, OptimizersThatDifferAreRefused) {
  RunTorchRanks(2, [](int rank, const Session& session) {
    auto a = torch::zeros({2}, torch::requires_grad());
    auto b = torch::zeros({rank + 3}, torch::requires_grad());
    torch::optim::SGD sgd({a, b}, torch::optim::SGDOptions(0.1));
    EXPECT_THAT(ErrorOf(ErrorCode::mismatch, [&] { broadcast_optimizer_state(sgd, 0, session); }),
                AllOf(HasSubstr("parameter 1 of group 0"), HasSubstr("[3] on rank 0")));
  });
}

}  // namespace
}  // namespace sirtaki::tests
