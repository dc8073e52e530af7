#include "sirtaki/optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <sstream>
#include <vector>

#include "sirtaki/broadcast.h"
#include "tests/torch/gradients/overlap.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

template <class Base>
DistributedOptimizer<Base> Wrap(Base base, const torch::nn::Module& module,
                                Average average = Average::Backward) {
  return DistributedOptimizer<Base>(std::move(base), module.named_parameters(),
                                    DistributedOptimizerOptions().average_at(average));
}

SGD MakeSgdWithMomentum(std::vector<torch::Tensor> parameters) {
  return SGD(std::move(parameters), SGDOptions(0.1).momentum(0.9));
}

// ---- without names ----

TEST(UnnamedParametersTest, AreMatchedByTheirPlace) {
  constexpr int kSteps = 5;
  const auto expected = TrainAlone(MakeSgdWithMomentum, kSteps, 2);
  RunTorchRanks(2, [&](int rank) {
    SmallNet net;
    auto optimizer =
        DistributedOptimizer(MakeSgdWithMomentum(net.parameters()), DistributedOptimizerOptions());
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      Loss(net, BatchOfRank(step, rank)).backward();
      optimizer.step();
    }
    EXPECT_LT(Distance(net.parameters(), expected), 1e-13);
  });
}

TEST(UnnamedParametersTest, AreComparedBetweenTheRanks) {
  RunTorchRanks(2, [](int rank) {
    const auto shared = torch::ones({3}, torch::requires_grad());
    const auto other = torch::ones({rank + 4}, torch::requires_grad());
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          DistributedOptimizer(SGD({shared, other}, SGDOptions(0.1)),
                                               DistributedOptimizerOptions());
                        }),
                AllOf(HasSubstr("parameter 1"), HasSubstr("[4]"), HasSubstr("[5]")));
  });
}

// ---- the same as one process that sees the joined batch ----

template <class MakeOptimizer>
void ExpectFollowsOneProcess(const MakeOptimizer& make_optimizer, double tolerance) {
  constexpr int kSteps = 20;
  for (const int size : {1, 2, 3}) {
    const auto expected = TrainAlone(make_optimizer, kSteps, size);
    for (const Average average : {Average::Backward, Average::Step}) {
      RunTorchRanks(size, [&](int rank) {
        SmallNet net;
        auto optimizer = Wrap(make_optimizer(net.parameters()), net, average);
        for (int step = 0; step < kSteps; ++step) {
          optimizer.zero_grad();
          Loss(net, BatchOfRank(step, rank)).backward();
          optimizer.step();
        }
        EXPECT_LT(Distance(net.parameters(), expected), tolerance) << size << " ranks";
      });
    }
  }
}

TEST(EquivalenceTest, SgdWithMomentum) { ExpectFollowsOneProcess(MakeSgdWithMomentum, 1e-13); }

TEST(EquivalenceTest, Adam) {
  ExpectFollowsOneProcess(
      [](std::vector<torch::Tensor> p) { return Adam(std::move(p), AdamOptions(0.01)); }, 1e-11);
}

TEST(EquivalenceTest, AdamW) {
  ExpectFollowsOneProcess(
      [](std::vector<torch::Tensor> p) {
        return torch::optim::AdamW(std::move(p), torch::optim::AdamWOptions(0.01).amsgrad(true));
      },
      1e-11);
}

TEST(EquivalenceTest, RmsProp) {
  ExpectFollowsOneProcess(
      [](std::vector<torch::Tensor> p) {
        return torch::optim::RMSprop(std::move(p), torch::optim::RMSpropOptions(0.01));
      },
      1e-11);
}

TEST(EquivalenceTest, Adagrad) {
  ExpectFollowsOneProcess(
      [](std::vector<torch::Tensor> p) {
        return torch::optim::Adagrad(std::move(p), torch::optim::AdagradOptions(0.01));
      },
      1e-11);
}

TEST(EquivalenceTest, StepWithAClosure) {
  const auto make = [](std::vector<torch::Tensor> p) {
    return torch::optim::LBFGS(std::move(p), torch::optim::LBFGSOptions(0.5).max_iter(4));
  };
  constexpr int kSize = 2;
  SmallNet alone;
  auto reference = make(alone.parameters());
  std::vector<double> losses;
  const auto step_alone = [&](int step) {
    const auto loss = reference.step([&] {
      reference.zero_grad();
      auto value = Loss(alone, JoinedBatch(step, kSize));
      value.backward();
      return value;
    });
    losses.push_back(loss.item<double>());
  };
  for (int step = 0; step < 5; ++step) step_alone(step);

  RunTorchRanks(kSize, [&](int rank) {
    SmallNet net;
    auto optimizer = Wrap(make(net.parameters()), net);
    for (int step = 0; step < 5; ++step) {
      const auto loss = optimizer.step([&] {
        optimizer.zero_grad();
        auto value = Loss(net, BatchOfRank(step, rank));
        value.backward();
        return value;
      });
      EXPECT_NEAR(loss.item<double>(), losses[static_cast<std::size_t>(step)], 1e-9);
    }
    EXPECT_LT(Distance(net.parameters(), alone.parameters()), 1e-8);
  });
}

TEST(EquivalenceTest, ParametersStayIdenticalToTheBit) {
  std::vector<std::vector<torch::Tensor>> of_rank(3);
  RunTorchRanks(3, [&](int rank) {
    SmallNet net;
    auto optimizer = Wrap(MakeSgdWithMomentum(net.parameters()), net);
    for (int step = 0; step < 10; ++step) {
      optimizer.zero_grad();
      Loss(net, BatchOfRank(step, rank)).backward();
      optimizer.step();
    }
    of_rank[static_cast<std::size_t>(rank)] = net.parameters();
  });
  EXPECT_EQ(Distance(of_rank[0], of_rank[1]), 0);
  EXPECT_EQ(Distance(of_rank[0], of_rank[2]), 0);
}

// ---- when gradients are reduced ----

TEST(OverlapTest, AGradientIsReducedWhileBackwardStillRuns) {
  constexpr int kSize = 2;
  RunTorchRanks(kSize, [&](int rank) {
    EXPECT_TRUE(LastGradientIsReducedBeforeTheFirstExists(rank, kSize, [&](const auto& names) {
      return DistributedOptimizer(SGD(names.values(), SGDOptions(0.1)), names);
    }));
  });
}

TEST(SynchronizeTest, GradientsMayBeChangedBetweenItAndStep) {
  RunTorchRanks(2, [](int rank) {
    auto weight = torch::zeros({2}, torch::requires_grad());
    const NamedTensors names = {{"weight", weight}};
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1.0)), names);
    (weight.sum() * (rank + 1)).backward();
    optimizer.synchronize();
    EXPECT_TRUE(torch::equal(weight.grad(), torch::full({2}, 1.5f)));
    optimizer.synchronize();  // nothing more to do
    weight.mutable_grad().fill_(7);
    optimizer.step();
    EXPECT_TRUE(torch::equal(weight.detach(), torch::full({2}, -7.0f)));
  });
}

TEST(SynchronizeTest, ASecondBackwardAfterItAddsToTheAverage) {
  for (const Average average : {Average::Backward, Average::Step}) {
    RunTorchRanks(2, [average](int rank) {
      auto weight = torch::zeros({1}, torch::requires_grad());
      const NamedTensors names = {{"weight", weight}};
      auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1.0)), names,
                                            DistributedOptimizerOptions().average_at(average));
      (weight.sum() * (rank + 1)).backward();
      optimizer.synchronize();
      (weight.sum() * 10 * (rank + 1)).backward();
      optimizer.step();
      EXPECT_EQ(weight.item<float>(), -(1.5f + 15.0f));
    });
  }
}

// ---- parameters without a gradient ----

struct TwoBranches : torch::nn::Module {
  TwoBranches() {
    used = register_parameter("used", torch::ones({2}));
    other = register_parameter("other", torch::ones({3}));
  }
  torch::Tensor used;
  torch::Tensor other;
};

TEST(UnusedTest, OnOneRankCountsAsZero) {
  RunTorchRanks(2, [](int rank) {
    TwoBranches net;
    auto optimizer = Wrap(SGD(net.parameters(), SGDOptions(1.0)), net);
    auto loss = net.used.sum();
    if (rank == 0) loss = loss + net.other.sum() * 4;
    loss.backward();
    optimizer.step();
    EXPECT_TRUE(torch::equal(net.used.detach(), torch::full({2}, 0.0f)));
    EXPECT_TRUE(torch::equal(net.other.detach(), torch::full({3}, -1.0f)));
  });
}

TEST(UnusedTest, OnAllRanksStaysUndefined) {
  RunTorchRanks(2, [](int) {
    TwoBranches net;
    // Weight decay would move a parameter whose gradient is zero instead of undefined.
    auto optimizer = Wrap(SGD(net.parameters(), SGDOptions(1.0).weight_decay(0.5)), net);
    net.used.sum().backward();
    optimizer.step();
    EXPECT_FALSE(net.other.grad().defined());
    EXPECT_TRUE(torch::equal(net.other.detach(), torch::ones({3})));
  });
}

TEST(UnusedTest, FrozenAndUnfrozenLater) {
  RunTorchRanks(2, [](int rank) {
    TwoBranches net;
    net.other.requires_grad_(false);
    auto optimizer = Wrap(SGD(net.parameters(), SGDOptions(1.0)), net);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      if (step == 1) net.other.requires_grad_(true);
      ((net.used.sum() + net.other.sum()) * (rank + 1)).backward();
      optimizer.step();
      EXPECT_TRUE(torch::equal(net.other.detach(), torch::full({3}, 1.0f - 1.5f * step))) << step;
    }
  });
}

TEST(UnusedTest, ZeroedInPlaceGradientsStayDefined) {
  RunTorchRanks(2, [](int rank) {
    TwoBranches net;
    auto optimizer = Wrap(SGD(net.parameters(), SGDOptions(1.0)), net);
    ((net.used.sum() + net.other.sum()) * (rank + 1)).backward();
    optimizer.step();
    optimizer.zero_grad(/*set_to_none=*/false);
    net.used.sum().backward();
    optimizer.step();
    EXPECT_TRUE(torch::equal(net.other.grad(), torch::zeros({3})));
    EXPECT_TRUE(torch::equal(net.used.detach(), torch::full({2}, 1 - 1.5f - 1)));
  });
}

// ---- gradients of other kinds ----

TEST(GradientTest, NotContiguous) {
  RunTorchRanks(2, [](int rank) {
    auto weight = torch::zeros({3, 2}).t().requires_grad_();
    const NamedTensors names = {{"weight", weight}};
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1.0)), names);
    const auto factor = torch::arange(6, torch::kFloat).reshape({2, 3}) * (rank + 1);
    (weight * factor).sum().backward();
    ASSERT_FALSE(weight.grad().is_contiguous());
    optimizer.step();
    EXPECT_TRUE(
        torch::equal(weight.detach(), -1.5 * torch::arange(6, torch::kFloat).reshape({2, 3})));
  });
}

TEST(GradientTest, OfNoElementsAndOfNoDimension) {
  RunTorchRanks(2, [](int rank) {
    auto empty = torch::empty({0, 3}, torch::requires_grad());
    auto scalar = torch::tensor(1.0, torch::requires_grad());
    const NamedTensors names = {{"empty", empty}, {"scalar", scalar}};
    auto optimizer = DistributedOptimizer(SGD({empty, scalar}, SGDOptions(1.0)), names);
    (empty.sum() + scalar * (rank + 1)).backward();
    optimizer.step();
    EXPECT_FLOAT_EQ(scalar.item<float>(), 1 - 1.5f);
  });
}

TEST(GradientTest, TiedWeightsAreReducedOnce) {
  RunTorchRanks(2, [](int rank) {
    auto weight = torch::zeros({2}, torch::requires_grad());
    const NamedTensors names = {{"a", weight}, {"b", weight}};
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1.0)), names);
    ((weight.sum() + 2 * weight.sum()) * (rank + 1)).backward();
    optimizer.step();
    EXPECT_TRUE(torch::equal(weight.detach(), torch::full({2}, -4.5f)));
  });
}

// ---- what may not be done between backward and step, where step() waits for the averages ----

TEST(MisuseTest, SecondBackwardNamesTheParameterAndTheCure) {
  RunTorchRanks(2, [](int) {
    SmallNet net;
    auto optimizer = Wrap(MakeSgdWithMomentum(net.parameters()), net, Average::Step);
    const Batch batch = BatchOfRank(0, 0);
    Loss(net, batch).backward();
    const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] { Loss(net, batch).backward(); });
    EXPECT_THAT(text, AllOf(HasSubstr("output."), HasSubstr("step()"), HasSubstr("synchronize()")));
    optimizer.step();
    optimizer.zero_grad();
    Loss(net, batch).backward();
    optimizer.step();
  });
}

TEST(MisuseTest, ZeroGradSaysWhatToDo) {
  RunTorchRanks(2, [](int) {
    SmallNet net;
    auto optimizer = Wrap(MakeSgdWithMomentum(net.parameters()), net, Average::Step);
    Loss(net, BatchOfRank(0, 0)).backward();
    const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.zero_grad(); });
    EXPECT_THAT(text, AllOf(HasSubstr("hidden."), HasSubstr("step()")));
    optimizer.synchronize();
    optimizer.zero_grad();
  });
}

TEST(MisuseTest, GradientsReplacedThroughTheModule) {
  RunTorchRanks(2, [](int) {
    SmallNet net;
    auto optimizer = Wrap(MakeSgdWithMomentum(net.parameters()), net, Average::Step);
    Loss(net, BatchOfRank(0, 0)).backward();
    net.zero_grad();
    const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); });
    EXPECT_THAT(text, AllOf(HasSubstr("hidden."), HasSubstr("zero_grad()")));
    Loss(net, BatchOfRank(0, 0)).backward();
    optimizer.step();
  });
}

// Nobody can see a zero_grad() through the module or the base; the next backward() does.
TEST(MisuseTest, ZeroGradBehindTheWrapperIsMetByTheNextBackward) {
  for (const bool by_module : {true, false}) {
    RunTorchRanks(2, [by_module](int rank) {
      SmallNet net;
      auto optimizer = Wrap(MakeSgdWithMomentum(net.parameters()), net, Average::Step);
      Loss(net, BatchOfRank(0, rank)).backward();
      if (by_module) {
        net.zero_grad();
      } else {
        static_cast<torch::optim::Optimizer&>(optimizer).zero_grad();
      }
      const auto text =
          ErrorOf(ErrorCode::InvalidArgument, [&] { Loss(net, BatchOfRank(1, rank)).backward(); });
      EXPECT_THAT(text, AllOf(HasSubstr("output."), HasSubstr("step()"), HasSubstr("zero_grad()")));
      EXPECT_THROW(optimizer.synchronize(), Error);
      optimizer.zero_grad();
      Loss(net, BatchOfRank(0, rank)).backward();
      optimizer.step();
      EXPECT_LT(Distance(net.parameters(), TrainAlone(MakeSgdWithMomentum, 1, 2)), 1e-13);
    });
  }
}

TEST(MisuseTest, AGradientWrittenBeforeTheStep) {
  RunTorchRanks(2, [](int) {
    SmallNet net;
    auto optimizer = Wrap(MakeSgdWithMomentum(net.parameters()), net, Average::Step);
    Loss(net, BatchOfRank(0, 0)).backward();
    net.hidden->weight.grad().mul_(0.5);  // clipping without synchronize()
    const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); });
    EXPECT_THAT(text, AllOf(HasSubstr("hidden.weight"), HasSubstr("changed")));
    optimizer.zero_grad();
    Loss(net, BatchOfRank(0, 0)).backward();
    optimizer.step();
  });
}

TEST(MisuseTest, AnOptimizerThatWasMovedFrom) {
  RunTorchRanks(2, [](int) {
    SmallNet net;
    auto optimizer = Wrap(MakeSgdWithMomentum(net.parameters()), net);
    auto moved = std::move(optimizer);
    // NOLINTNEXTLINE(bugprone-use-after-move): that is what is tested
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                HasSubstr("moved from"));
  });
}

// ---- making one ----

struct OneLayer : torch::nn::Module {
  OneLayer(const std::string& name, std::int64_t outputs, torch::ScalarType type) {
    weight = register_parameter(name, torch::zeros({outputs, 2}, type));
  }
  torch::Tensor weight;
};

void ExpectRefused(const std::function<std::shared_ptr<torch::nn::Module>(int rank)>& make,
                   const std::vector<std::string>& words) {
  RunTorchRanks(3, [&](int rank) {
    const auto net = make(rank);
    SGD sgd(net->parameters(), SGDOptions(0.5));
    const auto text = ErrorOf(ErrorCode::Mismatch, [&] {
      DistributedOptimizer(std::move(sgd), net->named_parameters());
    });
    for (const std::string& word : words) EXPECT_THAT(text, HasSubstr(word));
    EXPECT_EQ(sgd.param_groups().size(), 1u) << "the optimizer is still usable";
  });
}

TEST(WrapTest, ShapesThatDifferAreNamedOnEveryRank) {
  ExpectRefused(
      [](int rank) { return std::make_shared<OneLayer>("w", rank == 1 ? 4 : 3, torch::kFloat); },
      {"\"w\" float32 [3, 2] on ranks 0, 2", "\"w\" float32 [4, 2] on rank 1"});
}

TEST(WrapTest, NamesThatDifferAreNamedOnEveryRank) {
  ExpectRefused(
      [](int rank) { return std::make_shared<OneLayer>(rank == 2 ? "v" : "w", 3, torch::kFloat); },
      {"\"w\" float32 [3, 2] on ranks 0-1", "\"v\" float32 [3, 2] on rank 2"});
}

TEST(WrapTest, TypesThatDifferAreNamedOnEveryRank) {
  ExpectRefused(
      [](int rank) {
        return std::make_shared<OneLayer>("w", 3, rank == 0 ? torch::kDouble : torch::kFloat);
      },
      {"float64 [3, 2] on rank 0", "float32 [3, 2] on ranks 1-2"});
}

TEST(WrapTest, AParameterMoreOnOneRank) {
  ExpectRefused(
      [](int rank) -> std::shared_ptr<torch::nn::Module> {
        if (rank == 0) return std::make_shared<TwoBranches>();
        auto net = std::make_shared<torch::nn::Module>();
        net->register_parameter("used", torch::ones({2}));
        return net;
      },
      {"\"other\" float32 [3] on rank 0", "nothing more on ranks 1-2"});
}

TEST(WrapTest, MissingAndDuplicateNamesAreToldToAllRanks) {
  RunTorchRanks(2, [](int rank) {
    auto a = torch::zeros({2}, torch::requires_grad());
    auto b = torch::zeros({3}, torch::requires_grad());
    NamedTensors names = {{"a", a}, {"b", b}};
    if (rank == 1) names.pop_back();
    auto text = ErrorOf(ErrorCode::InvalidArgument, [&] {
      DistributedOptimizer(SGD({a, b}, SGDOptions(0.1)), names);
    });
    EXPECT_THAT(text, AllOf(HasSubstr("float32 [3]"), HasSubstr("no name"), HasSubstr("rank 1")));

    names = {{"a", a}, {rank == 0 ? "a" : "b", b}};
    text = ErrorOf(ErrorCode::InvalidArgument, [&] {
      DistributedOptimizer(SGD({a, b}, SGDOptions(0.1)), names);
    });
    EXPECT_THAT(text, AllOf(HasSubstr("\"a\" is given twice"), HasSubstr("rank 0")));
  });
}

TEST(WrapTest, IsStillItsBase) {
  RunTorchRanks(2, [](int rank) {
    SmallNet net;
    auto optimizer = Wrap(MakeSgdWithMomentum(net.parameters()), net);
    torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.5);
    Loss(net, BatchOfRank(0, rank)).backward();
    torch::optim::Optimizer& base = optimizer;
    base.step();
    for (int i = 0; i < 2; ++i) scheduler.step();  // the first leaves the rate as it is
    EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), 0.05);

    std::stringstream stream;
    torch::save(optimizer, stream);
    auto loaded = MakeSgdWithMomentum(net.parameters());
    torch::load(loaded, stream);
    EXPECT_DOUBLE_EQ(loaded.param_groups()[0].options().get_lr(), 0.05);
    EXPECT_EQ(loaded.state().size(), net.parameters().size());
  });
}

TEST(WrapTest, MovesWithItsHooks) {
  const auto expected = TrainAlone(MakeSgdWithMomentum, 2, 2);
  RunTorchRanks(2, [&](int rank) {
    SmallNet net;
    auto first = Wrap(MakeSgdWithMomentum(net.parameters()), net);
    auto optimizer = std::move(first);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      Loss(net, BatchOfRank(step, rank)).backward();
      auto moved = std::move(optimizer);
      moved.step();
      optimizer = std::move(moved);
    }
    EXPECT_LT(Distance(net.parameters(), expected), 1e-13);
  });
}

TEST(WrapTest, LeavesHooksBehindThatDoNothing) {
  RunTorchRanks(2, [](int rank) {
    SmallNet net;
    const auto loss = Loss(net, BatchOfRank(0, rank));  // keeps the graph's nodes
    std::optional<DistributedOptimizer<SGD>> optimizer(
        Wrap(MakeSgdWithMomentum(net.parameters()), net));
    optimizer.reset();
    loss.backward();
    SmallNet alone;
    Loss(alone, BatchOfRank(0, rank)).backward();
    EXPECT_TRUE(torch::equal(net.output->bias.grad(), alone.output->bias.grad()));
    // The same node serves another, whose hooks alone are at work.
    auto next = Wrap(MakeSgdWithMomentum(net.parameters()), net);
    next.zero_grad();
    Loss(net, BatchOfRank(0, rank)).backward();
    next.step();
    EXPECT_LT(Distance(net.parameters(), TrainAlone(MakeSgdWithMomentum, 1, 2)), 1e-13);
  });
}

TEST(WrapTest, MayBeDestroyedWhileGradientsAreBeingReduced) {
  RunTorchRanks(2, [](int rank) {
    SmallNet net;
    for (int i = 0; i < 3; ++i) {
      auto optimizer = Wrap(MakeSgdWithMomentum(net.parameters()), net);
      optimizer.zero_grad();
      Loss(net, BatchOfRank(0, rank)).backward();
    }
    auto optimizer = Wrap(MakeSgdWithMomentum(net.parameters()), net);
    optimizer.zero_grad();
    Loss(net, BatchOfRank(0, rank)).backward();
    optimizer.step();
    EXPECT_LT(Distance(net.parameters(), TrainAlone(MakeSgdWithMomentum, 1, 2)), 1e-13);
  });
}

TEST(WrapTest, TwoOptimizersOfTwoModelsWithTheSameNames) {
  RunTorchRanks(2, [](int rank) {
    SmallNet a;
    SmallNet b;
    auto first = Wrap(MakeSgdWithMomentum(a.parameters()), a);
    auto second = Wrap(MakeSgdWithMomentum(b.parameters()), b);
    (Loss(a, BatchOfRank(0, rank)) + Loss(b, BatchOfRank(0, rank))).backward();
    first.step();
    second.step();
    EXPECT_EQ(Distance(a.parameters(), b.parameters()), 0);
  });
}

TEST(WrapTest, OneRankThatAveragesInStepHasNoHooks) {
  RunTorchRanks(1, [](int) {
    SmallNet net;
    const auto node = torch::autograd::impl::grad_accumulator(net.output->bias);
    auto optimizer = Wrap(MakeSgdWithMomentum(net.parameters()), net, Average::Step);
    EXPECT_TRUE(node->post_hooks().empty());
    EXPECT_TRUE(node->pre_hooks().empty());
  });
}

// One that outlives its session stays out of the way of the next, also with gradients under way.
TEST(WrapTest, OfAnEndedSessionHasHooksThatDoNothing) {
  std::vector<std::unique_ptr<SmallNet>> nets(2);
  std::vector<std::unique_ptr<DistributedOptimizer<SGD>>> old(2);
  RunTorchRanks(2, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    nets[index] = std::make_unique<SmallNet>();
    old[index] = std::make_unique<DistributedOptimizer<SGD>>(
        Wrap(MakeSgdWithMomentum(nets[index]->parameters()), *nets[index]));
    Loss(*nets[index], BatchOfRank(0, rank)).backward();
  });
  EXPECT_THAT(ErrorOf(ErrorCode::NotInitialized, [&] { old[0]->zero_grad(); }),
              HasSubstr("shut down"));
  for (auto& net : nets) net->zero_grad();
  RunTorchRanks(2, [&](int rank) {
    SmallNet& net = *nets[static_cast<std::size_t>(rank)];
    auto optimizer = Wrap(MakeSgdWithMomentum(net.parameters()), net);
    Loss(net, BatchOfRank(0, rank)).backward();
    optimizer.step();
    EXPECT_LT(Distance(net.parameters(), TrainAlone(MakeSgdWithMomentum, 1, 2)), 1e-13);
  });
}

TEST(WrapTest, OfAnEndedSessionIsRefused) {
  for (const int size : {1, 2}) {
    std::vector<std::unique_ptr<SmallNet>> nets(2);
    std::vector<std::unique_ptr<DistributedOptimizer<SGD>>> optimizers(2);
    RunTorchRanks(size, [&](int rank) {
      const auto index = static_cast<std::size_t>(rank);
      nets[index] = std::make_unique<SmallNet>();
      optimizers[index] = std::make_unique<DistributedOptimizer<SGD>>(
          MakeSgdWithMomentum(nets[index]->parameters()), nets[index]->named_parameters(),
          DistributedOptimizerOptions());
    });
    EXPECT_THAT(ErrorOf(ErrorCode::NotInitialized, [&] { optimizers[0]->step(); }),
                HasSubstr("shut down"));
  }
}

}  // namespace
}  // namespace sirtaki::tests
