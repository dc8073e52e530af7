#include "sirtaki/broadcast.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

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
  RunTorchRanks(3, [](int rank) {
    WithBuffers net(rank + 10);
    broadcast_parameters(net, 1);
    EXPECT_TRUE(torch::equal(net.weight.detach(), torch::full({3, 2}, 11.0f)));
    EXPECT_TRUE(net.weight.requires_grad() && net.weight.is_leaf());
    EXPECT_EQ(net.steps.item<std::int64_t>(), 11);
    EXPECT_TRUE(torch::equal(net.norm->running_mean, torch::full({3}, 11.0f)));
    EXPECT_TRUE(torch::equal(net.norm->weight.detach(), torch::full({3}, 11.0f)));
  });
}

TEST(BroadcastParametersTest, TakesDictionariesAndLists) {
  RunTorchRanks(2, [](int rank) {
    SmallNet net;
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : net.parameters()) parameter.fill_(rank);
    }
    broadcast_parameters(net.named_parameters(), 1);
    for (const auto& parameter : net.parameters()) {
      EXPECT_TRUE(torch::equal(parameter.detach(), torch::ones_like(parameter)));
    }
    std::vector<torch::Tensor> tensors = {torch::full({2}, rank), torch::full({}, rank)};
    broadcast_parameters(tensors, 0);
    EXPECT_EQ(tensors[0].sum().item<std::int64_t>() + tensors[1].item<std::int64_t>(), 0);
  });
}

TEST(BroadcastParametersTest, ModelsThatDifferAreRefusedAndUntouched) {
  RunTorchRanks(2, [](int rank) {
    std::vector<torch::Tensor> tensors = {torch::full({2}, rank),
                                          torch::full({rank == 0 ? 3 : 4}, rank)};
    const auto text = ErrorOf(ErrorCode::Mismatch, [&] { broadcast_parameters(tensors, 0); });
    EXPECT_THAT(text, AllOf(HasSubstr("\"tensor 1\" int64 [3] on rank 0"),
                            HasSubstr("\"tensor 1\" int64 [4] on rank 1")));
    EXPECT_EQ(tensors[0].sum().item<std::int64_t>(), 2 * rank);
  });
}

TEST(BroadcastParametersTest, RootsThatDifferOrDoNotExistAreRefused) {
  RunTorchRanks(2, [](int rank) {
    const std::vector<torch::Tensor> tensors = {torch::ones({2})};
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { broadcast_parameters(tensors, rank); }),
                AllOf(HasSubstr("root rank 0 on rank 0"), HasSubstr("root rank 1 on rank 1")));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { broadcast_parameters(tensors, 2); }),
                HasSubstr("root rank 2 is not in the job: its ranks are 0 to 1"));
  });
}

}  // namespace
}  // namespace sirtaki::tests
