// Where ranks are threads, calls belong to the session of their thread, and what a rank has made
// goes on in its session wherever it is used.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "frameworks/torch/session/session_scope.h"
#include "sirtaki/torch.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using ::testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;

// Calls it on a thread without a scope, as autograd's threads are.
void Elsewhere(const std::function<void()>& call) {
  std::thread([&call] {
    ErrorOf(ErrorCode::NotInitialized, [] { rank(); });
    call();
  }).join();
}

TEST(SessionScopeTest, HoldsForItsThreadAndMayBeNested) {
  std::vector<std::shared_ptr<detail::SessionState>> sessions(2);
  RunTorchRanks(2, [&](int r) {
    const auto own = detail::CurrentSession();
    sessions[static_cast<std::size_t>(r)] = own;
    barrier();
    const auto other = sessions[static_cast<std::size_t>(1 - r)];
    EXPECT_NE(own, other);
    EXPECT_EQ(rank(), r);
    {
      const detail::SessionScope inner(other);
      EXPECT_EQ(rank(), 1 - r);
      const detail::SessionScope none(nullptr);
      EXPECT_THAT(ErrorOf(ErrorCode::NotInitialized, [] { rank(); }), HasSubstr("init()"));
    }
    EXPECT_EQ(detail::CurrentSession(), own);
    Elsewhere([] {});
    barrier();  // the other rank's session has to be there until here
  });
}

TEST(SessionScopeTest, WhatTakesPartInTrainingGoesOnInItsSession) {
  RunTorchRanks(2, [](int r) {
    auto weight = torch::ones({3}, torch::requires_grad());
    const std::vector<std::pair<std::string, at::Tensor>> names = {{"w", weight}};
    DistributedOptimizer<SGD> optimizer(SGD({weight}, SGDOptions(1.0)), names);
    GradScaler scaler(GradScalerOptions().init_scale(4));
    SyncBatchNorm norm(torch::nn::BatchNormOptions(3));
    norm = SyncBatchNorm(std::dynamic_pointer_cast<SyncBatchNormImpl>(norm->clone()));
    const DistributedSampler sampler(8);
    Elsewhere([&] {
      const auto x = torch::full({1, 3}, r + 1.0F, torch::requires_grad());
      scaler.scale((weight * x.detach()).sum() + norm->forward(x).square().sum()).backward();
      scaler.unscale_(optimizer);
      EXPECT_NEAR(clip_grad_norm_(optimizer, 100), 1.5 * std::sqrt(3.0), 1e-5);
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
      optimizer.zero_grad();
    });
    EXPECT_TRUE(torch::equal(weight.detach(), torch::full({3}, -0.5F)));
    EXPECT_TRUE(torch::allclose(norm->running_mean, torch::full({3}, 0.15F)));
    EXPECT_EQ(sampler.size(), 4U);
  });
}

TEST(SessionScopeTest, AWrappedModuleGoesOnInItsSession) {
  RunTorchRanks(2, [](int r) {
    torch::nn::Sequential layers(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2));
    DistributedDataParallel<torch::nn::SequentialImpl> model(layers);
    Elsewhere([&] { model.forward(torch::full({3, 2}, r + 1.0F)).sum().backward(); });
    check_parameters(layers->named_parameters().pairs());
    const auto gradient = layers->parameters()[0].grad();
    EXPECT_TRUE(torch::equal(broadcast(gradient, 0), gradient));
  });
}

TEST(SessionScopeTest, WhatRunsInABackwardGoesOnInItsSession) {
  RunTorchRanks(2, [](int r) {
    const auto x = torch::full({2}, r + 1.0F, torch::requires_grad());
    const auto sum = [](const char* name) {
      return AllreduceOptions().name(name).op(ReduceOp::Sum);
    };
    const auto of_call = allreduce(x * x, sum("call")).sum();
    const auto again = recompute(
        [sum](const torch::Tensor& y) { return allreduce(y * y, sum("again")).sum(); }, x);
    Elsewhere([&] { of_call.backward(); });
    Elsewhere([&] { again.backward(); });
    EXPECT_TRUE(torch::equal(x.grad(), torch::full({2}, 8 * (r + 1.0F))));
  });
}

TEST(SessionScopeTest, ACommunicationHookIsCalledInItsSession) {
  RunTorchRanks(2, [](int r) {
    auto weight = torch::ones({3}, torch::requires_grad());
    const CommunicationHook hook = [](const GradientBucket& bucket) {
      allreduce_(bucket.buffer, AllreduceOptions().name(bucket.name + "/first"));
      return [buffer = bucket.buffer, name = bucket.name] {
        return allreduce_(buffer, AllreduceOptions().name(name + "/then"));
      };
    };
    const std::vector<std::pair<std::string, at::Tensor>> names = {{"w", weight}};
    DistributedOptimizer<SGD> optimizer(SGD({weight}, SGDOptions(1.0)), names,
                                        DistributedOptimizerOptions().hook(hook));
    Elsewhere([&] {
      (weight * (r + 1)).sum().backward();
      optimizer.step();
    });
    EXPECT_TRUE(torch::equal(weight.detach(), torch::full({3}, -0.5F)));
  });
}

}  // namespace
}  // namespace sirtaki::tests
