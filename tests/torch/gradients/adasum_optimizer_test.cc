// Adasum in DistributedOptimizer: of what each rank's step has changed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sirtaki/check_parameters.h"
#include "sirtaki/data_parallel.h"
#include "sirtaki/grad_scaler.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/session.h"
#include "tests/torch/gradients/adasum_training.h"
#include "tests/torch/gradients/sparse_training.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Options = DistributedOptimizerOptions;
using Tensors = std::vector<torch::Tensor>;

Options Adasum() { return Options().op(ReduceOp::Adasum); }

SGD MakeSgd(Tensors parameters) {
  return SGD(std::move(parameters), SGDOptions(0.1).momentum(0.9));
}

torch::Tensor Zeros(std::int64_t count) { return torch::zeros({count}, torch::requires_grad()); }

DistributedOptimizer<SGD> Wrap(const NamedTensors& names, const Options& options = Adasum()) {
  Tensors parameters;
  for (const auto& [name, tensor] : names) parameters.push_back(tensor);
  return DistributedOptimizer<SGD>(SGD(std::move(parameters), SGDOptions(1.0)), names, options);
}

template <class Make>
void ExpectFollowsTheReference(const Make& make) {
  constexpr int kSteps = 6;
  for (const int size : {1, 2, 3, 4}) {
    const auto expected = TrainByAdasum(make, kSteps, size);
    RunTorchRanks(size, [&](int rank) {
      SmallNet net;
      auto optimizer =
          DistributedOptimizer(make(net.parameters()), net.named_parameters(), Adasum());
      for (int step = 0; step < kSteps; ++step) {
        optimizer.zero_grad();
        Loss(net, BatchOfRank(step, rank)).backward();
        optimizer.step();
        check_parameters(net);  // bit by bit
      }
      EXPECT_LT(Distance(net.parameters(), expected), 1e-12) << size << " ranks";
    });
  }
}

TEST(AdasumOptimizerTest, FollowsTheNaiveProcedure) {
  using namespace torch::optim;
  ExpectFollowsTheReference(MakeSgd);
  ExpectFollowsTheReference([](Tensors p) { return Adam(std::move(p), AdamOptions(0.01)); });
  ExpectFollowsTheReference(
      [](Tensors p) { return AdamW(std::move(p), AdamWOptions(0.01).weight_decay(0.1)); });
}

TEST(AdasumOptimizerTest, OrthogonalStepsAddAndParallelOnesAverage) {
  RunTorchRanks(2, [](int rank) {
    auto across = Zeros(2);
    auto along = Zeros(2);
    auto optimizer = Wrap({{"across", across}, {"along", along}});
    (across[rank] * 3 + along.sum() * 3).backward();
    optimizer.step();
    EXPECT_TRUE(torch::allclose(across.detach(), torch::full({2}, -3.0f)));
    EXPECT_TRUE(torch::allclose(along.detach(), torch::full({2}, -3.0f)));
  });
}

TEST(AdasumOptimizerTest, GradientsStayThisRanksOwn) {
  RunTorchRanks(3, [](int rank) {
    auto weight = Zeros(2);
    auto optimizer = Wrap({{"w", weight}});
    // There may be as many backward() as you like, and nothing is in flight between them.
    (weight.sum() * rank).backward();
    weight.sum().backward();
    optimizer.synchronize();
    EXPECT_EQ(weight.grad()[0].item<float>(), static_cast<float>(rank + 1));
    EXPECT_FLOAT_EQ(static_cast<float>(clip_grad_norm_(optimizer, 1e9)),
                    std::sqrt(2.0f) * static_cast<float>(rank + 1));
    optimizer.step();
    EXPECT_EQ(weight.grad()[0].item<float>(), static_cast<float>(rank + 1));
    EXPECT_FALSE(torch::equal(weight.detach(), torch::zeros({2})));
    optimizer.zero_grad();
  });
}

// Ranks without a gradient change nothing; one that nobody has leaves the weights as they are.
TEST(AdasumOptimizerTest, ARankWithoutAGradientChangesNothing) {
  RunTorchRanks(3, [](int rank) {
    auto one = Zeros(2);
    auto none = torch::full({2}, 0.1f, torch::requires_grad());
    auto frozen = torch::ones({2});
    auto optimizer = Wrap({{"one", one}, {"none", none}, {"frozen", frozen}});
    if (rank == 1) (one.sum() * 4).backward();
    optimizer.step();
    EXPECT_TRUE(torch::equal(one.detach(), torch::full({2}, -4.0f)));
    EXPECT_TRUE(torch::equal(none.detach(), torch::full({2}, 0.1f)));
    EXPECT_TRUE(torch::equal(frozen, torch::ones({2})));
  });
}

TEST(AdasumOptimizerTest, ConvergesWhereSumsOfStepsWouldNot) {
  RunTorchRanks(4, [](int rank) {
    auto weight = torch::full({8}, 5.0, torch::TensorOptions(torch::kDouble).requires_grad(true));
    auto optimizer = DistributedOptimizer<SGD>(SGD({weight}, SGDOptions(0.6)),
                                               NamedTensors{{"w", weight}}, Adasum());
    const auto scale = 1 + 0.2 * torch::sin(torch::arange(8) + rank).to(torch::kDouble);
    for (int step = 0; step < 40; ++step) {
      optimizer.zero_grad();
      ((weight - 1) * scale).pow(2).sum().backward();
      optimizer.step();
    }
    EXPECT_LT((weight - 1).abs().max().item<double>(), 1e-6);
  });
}

TEST(AdasumOptimizerTest, OfEachFloatingType) {
  for (const auto type : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    RunTorchRanks(3, [type](int rank) {
      auto weight = torch::ones({3, 2}, torch::TensorOptions(type).requires_grad(true));
      auto across = torch::ones({3, 4}, type).t().requires_grad_();  // does not lie flat
      auto optimizer = Wrap({{"w", weight}, {"t", across}});
      (weight.sum() * 2 + across.sum() * (rank + 1)).backward();
      optimizer.step();
      EXPECT_TRUE(torch::allclose(weight.detach(), torch::full({3, 2}, -1, type)));
      check_parameters({{"w", weight}, {"t", across}});
      EXPECT_FALSE(across.is_contiguous());
    });
  }
}

TEST(AdasumOptimizerTest, AClosureIsThisRanksOwn) {
  RunTorchRanks(2, [](int rank) {
    auto weight = Zeros(2);
    auto optimizer = Wrap({{"w", weight}});
    const auto loss = optimizer.step([&] {
      optimizer.zero_grad();
      auto value = weight[rank] * 2 + rank;
      value.backward();
      return value;
    });
    EXPECT_EQ(loss.item<float>(), static_cast<float>(rank));
    EXPECT_TRUE(torch::equal(weight.detach(), torch::full({2}, -2.0f)));
  });
}

TEST(AdasumOptimizerTest, StepsOfSeveralEvaluationsAreCombinedOnce) {
  RunTorchRanks(2, [](int rank) {
    SmallNet net;
    auto optimizer = DistributedOptimizer(
        torch::optim::LBFGS(net.parameters(), torch::optim::LBFGSOptions(0.1).max_iter(4)),
        net.named_parameters(), Adasum());
    double first = 0;
    double last = 0;
    for (int step = 0; step < 5; ++step) {
      last = optimizer
                 .step([&] {
                   optimizer.zero_grad();
                   auto loss = Loss(net, BatchOfRank(0, rank));
                   loss.backward();
                   return loss;
                 })
                 .item<double>();
      if (step == 0) first = last;
      check_parameters(net);
    }
    EXPECT_LT(last, first);
  });
}

TEST(AdasumOptimizerTest, SparseGradientsAreTheBasesAffair) {
  RunTorchRanks(2, [](int rank) {
    auto table = MakeTable(true);
    const auto before = table->weight.detach().clone();
    auto optimizer = DistributedOptimizer(SGD(table->parameters(), SGDOptions(1.0)),
                                          table->named_parameters(), Adasum());
    table(torch::tensor({rank})).sum().backward();
    optimizer.step();
    auto expected = before.clone();
    expected.slice(0, 0, 2) -= 1;
    EXPECT_TRUE(torch::allclose(table->weight, expected));
  });
}

TEST(AdasumOptimizerTest, SparseGradientsBecomeDenseForTheBase) {
  for (const int size : {1, 2}) {
    RunTorchRanks(size, [](int rank) {
      auto table = MakeTable(true);
      const auto before = table->weight.detach().clone();
      auto optimizer = DistributedOptimizer(
          torch::optim::Adam(table->parameters(), torch::optim::AdamOptions(0.1)),
          table->named_parameters(), Adasum().sparse_as_dense(true));
      const auto evaluate = [&] {
        optimizer.zero_grad();
        auto loss = table(torch::tensor({rank})).sum();
        loss.backward();
        return loss;
      };
      evaluate();
      optimizer.step();
      optimizer.step(evaluate);
      EXPECT_NEAR((before - table->weight)[rank][0].item<double>(), 0.2, 1e-6);
    });
  }
}

TEST(AdasumOptimizerTest, AStepThatThrowsTakesItsChangesBack) {
  RunTorchRanks(1, [](int) {
    // Alone it is the base's own step: nothing is kept for it.
    auto weight = Zeros(2);
    auto optimizer = Wrap({{"w", weight}});
    weight.sum().backward();
    optimizer.step();
    EXPECT_EQ(weight[0].item<float>(), -1);
  });
  RunTorchRanks(2, [](int rank) {
    auto weight = Zeros(2);
    auto optimizer = Wrap({{"w", weight}});
    EXPECT_THROW(optimizer.step([&]() -> torch::Tensor {
      torch::NoGradGuard no_grad;
      weight.add_(7);
      throw std::runtime_error("no data");
    }),
                 std::runtime_error);
    EXPECT_TRUE(torch::equal(weight.detach(), torch::zeros({2})));
    (weight[rank] * 2).backward();
    optimizer.step();
    EXPECT_TRUE(torch::equal(weight.detach(), torch::full({2}, -2.0f)));
  });
}

TEST(AdasumOptimizerTest, InfinityOnOneRankSkipsTheStepOnAll) {
  RunTorchRanks(2, [](int rank) {
    auto weight = Zeros(2);
    auto optimizer = Wrap({{"w", weight}});
    GradScaler scaler(GradScalerOptions().init_scale(8));
    for (const float bad : {0.0f, 1.0f}) {
      optimizer.zero_grad();
      scaler.scale(weight[rank] * 2 / (1 - bad * static_cast<float>(rank))).backward();
      EXPECT_EQ(scaler.step(optimizer), bad == 0);
      scaler.update();
    }
    EXPECT_TRUE(torch::equal(weight.detach(), torch::full({2}, -2.0f)));
  });
}

TEST(AdasumOptimizerTest, StaysInItsProcessSet) {
  RunTorchRanks(4, [](int rank) {
    const ProcessSet even = add_process_set({0, 2});
    const ProcessSet odd = add_process_set({1, 3});
    auto weight = Zeros(4);
    auto optimizer = Wrap({{"w", weight}}, Adasum().process_set(rank % 2 == 0 ? even : odd));
    weight[rank].backward();
    optimizer.step();
    auto expected = torch::zeros({4});
    expected[rank % 2] = -1;
    expected[rank % 2 + 2] = -1;
    EXPECT_TRUE(torch::equal(weight.detach(), expected));
  });
}

// A step of this optimizer gives the parameter other memory.
class Replacing : public SGD {
 public:
  using SGD::SGD;
  torch::Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (torch::Tensor& parameter : group.params()) {
        parameter.set_data(parameter.detach() - parameter.grad());
      }
    }
    return {};
  }
};

TEST(AdasumOptimizerTest, AStepMayReplaceTheMemory) {
  RunTorchRanks(2, [](int rank) {
    auto weight = Zeros(2);
    DistributedOptimizer<Replacing> optimizer(Replacing({weight}, SGDOptions(1.0)),
                                              NamedTensors{{"w", weight}}, Adasum());
    weight.index({rank}).backward();
    optimizer.step();
    EXPECT_TRUE(torch::equal(weight.detach(), torch::tensor({-1.0F, -1.0F}))) << weight;
  });
}

// ---- what is refused ----

TEST(AdasumOptimizerTest, WhatItCannotDoIsRefused) {
  RunTorchRanks(2, [](int) {
    const torch::Tensor memory = torch::zeros({6});
    const auto part = [&memory](int from) { return memory.narrow(0, from, 3).requires_grad_(); };
    Wrap({{"w", part(0)}, {"v", part(3)}});
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          Wrap({{"w", part(0)}, {"v", part(2)}});
                        }),
                HasSubstr("in the same memory"));
    const auto refusal = [&](const Options& options) {
      return ErrorOf(ErrorCode::InvalidArgument, [&] { Wrap({{"w", Zeros(2)}}, options); });
    };
    EXPECT_THAT(refusal(Adasum().compression(Compression::BF16)),
                HasSubstr("does not go with compression"));
    EXPECT_THAT(refusal(Adasum().gradient_predivide_factor(2)), HasSubstr("op Average"));
    EXPECT_THAT(refusal(Adasum().hook([](const GradientBucket&) { return nullptr; })),
                HasSubstr("hook"));
    auto net = std::make_shared<SmallNet>();
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          DistributedDataParallel<SmallNet>(
                              net, DistributedDataParallelOptions().gradients(Adasum()));
                        }),
                HasSubstr("use DistributedOptimizer"));
    auto weight = Zeros(2);
    auto optimizer = Wrap({{"w", weight}});
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { auto s = optimizer.skip_synchronize(); }),
                HasSubstr("Adasum"));
    // A parameter whose gradients are averaged has no changes of its own to combine.
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          Wrap({{"w", weight}}, {});
                        }),
                HasSubstr("another optimizer"));
  });
}

TEST(AdasumOptimizerTest, AFailureOfTheGroupIsThrownByTheStep) {
  std::promise<void> made;
  RunTorchRanks(2, [&made](int rank) {
    auto weight = Zeros(2);
    auto optimizer = Wrap({{"w", weight}});
    if (rank == 1) {
      made.get_future().wait_for(std::chrono::seconds(60));
      abort("enough");
      return;
    }
    made.set_value();
    weight.sum().backward();
    EXPECT_THAT(ErrorOf(ErrorCode::Aborted, [&] { optimizer.step(); }), HasSubstr("enough"));
  });
}

}  // namespace
}  // namespace sirtaki::tests
