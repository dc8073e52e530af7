// A fused step is the optimizer's own but for last bits, and its state stays the optimizer's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "sirtaki/optimizer.h"
#include "tests/torch/gradients/training_habits.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::HasSubstr;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

DistributedOptimizerOptions Fused() { return DistributedOptimizerOptions().fused(true); }

torch::Tensor Weight(torch::IntArrayRef shape, torch::ScalarType type = torch::kFloat) {
  return Waves(shape, 0).to(type).requires_grad_();
}

void Backward(const torch::Tensor& weight, int step) {
  (weight * Waves(weight.sizes(), 7.0 * step).to(weight.dtype())).sum().backward();
}

// ---- as the optimizer itself ----

class FusedHabitsTest : public testing::TestWithParam<std::tuple<habits::Kind, habits::Habit>> {};

TEST_P(FusedHabitsTest, MakesTheStepsOfTheOptimizerItself) {
  const auto [kind, habit] = GetParam();
  for (const int size : {1, 3}) {
    RunTorchRanks(
        size,
        [kind = kind, habit = habit](int rank) {
          const auto own = habits::TrainAsRank(kind, habit, rank);
          const auto fused = habits::TrainAsRank(kind, habit, rank, Fused());
          EXPECT_GT(Distance(fused, habits::HabitNet().parameters()), 1e-3) << "it learns";
          EXPECT_LT(Distance(fused, own), habits::ToleranceOf(kind)) << "rank " << rank;
          const auto sharded =
              habits::TrainAsRank(kind, habit, rank, Fused().shard(Shard::OptimizerState));
          EXPECT_EQ(Distance(sharded, fused), 0) << "rank " << rank;
        },
        habits::Deterministic());
  }
}

using habits::Habit;
using habits::Kind;
INSTANTIATE_TEST_SUITE_P(
    Some, FusedHabitsTest,
    testing::Combine(testing::Values(Kind::kMomentum, Kind::kNesterov, Kind::kAdam, Kind::kAdamW,
                                     Kind::kAdagrad),
                     testing::Values(Habit::kPlain, Habit::kNoSync, Habit::kClip, Habit::kFreeze,
                                     Habit::kUnused)),
    habits::NameOf);

// Steps with another state than zeros, in both ways, then compares parameters and state by what is saved.
template <class Optimizer, class Options>
void ExpectSameSteps(const Options& options, torch::ScalarType type, double tolerance) {
  // In a half type the optimizer itself loses the squares of small gradients.
  const bool is_half = at::isReducedFloatingType(type);
  const auto train = [&](bool fused) {
    const torch::ScalarType of_step = is_half && !fused ? torch::kFloat : type;
    const auto weight = Weight({4, 3, 5, 5}, type)
                            .detach()
                            .to(of_step)
                            .contiguous(torch::MemoryFormat::ChannelsLast);
    const std::vector<torch::Tensor> weights = {
        weight.requires_grad_(), Weight({31, 9}, type).detach().to(of_step).t().requires_grad_(),
        torch::zeros({0}, weight.options()).requires_grad_()};  // without an element to compare
    auto optimizer = DistributedOptimizer(Optimizer(weights, options),
                                          DistributedOptimizerOptions().fused(fused));
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      for (const auto& each : weights) Backward(each, step);
      // The memory of a gradient may lie in another order than that of its parameter.
      weights[1].mutable_grad() = weights[1].grad().contiguous();
      optimizer.step();
    }
    return std::vector<torch::Tensor>{weights[0].detach().to(torch::kDouble),
                                      weights[1].detach().to(torch::kDouble)};
  };
  const auto own = train(false);
  EXPECT_LT(Distance(train(true), own), tolerance) << type;
}

TEST(FusedStepTest, EveryOptionTypeAndLayout) {
  RunTorchRanks(1, [](int) {
    using namespace torch::optim;
    const std::vector<std::pair<torch::ScalarType, double>> types = {{torch::kFloat, 1e-6},
                                                                     {torch::kDouble, 1e-14},
                                                                     {torch::kHalf, 1e-2},
                                                                     {torch::kBFloat16, 0.1}};
    for (const auto& [type, tolerance] : types) {
      ExpectSameSteps<SGD>(SGDOptions(0.1), type, tolerance);
      ExpectSameSteps<SGD>(SGDOptions(0.1).momentum(0.9).dampening(0.3).weight_decay(0.1), type,
                           tolerance);
      ExpectSameSteps<Adam>(AdamOptions(0.01).weight_decay(0.1).eps(1e-4), type, tolerance);
      ExpectSameSteps<AdamW>(AdamWOptions(0.01).amsgrad(true).betas({0.8, 0.9}).eps(1e-4), type,
                             tolerance);
      ExpectSameSteps<Adagrad>(
          AdagradOptions(0.05).lr_decay(0.1).weight_decay(0.1).initial_accumulator_value(0.2), type,
          tolerance);
    }
  });
}

// A run may go from one way to the other at any step: state and its serial form are the optimizer's.
TEST(FusedStepTest, StateGoesFromOneWayToTheOther) {
  RunTorchRanks(1, [](int) {
    const auto train = [](const std::vector<bool>& ways) {
      const torch::Tensor weight = Weight({50});
      std::string saved;
      for (std::size_t step = 0; step < ways.size(); ++step) {
        auto optimizer = DistributedOptimizer(Adam({weight}, AdamOptions(0.01).amsgrad(true)),
                                              DistributedOptimizerOptions().fused(ways[step]));
        if (!saved.empty()) {
          std::istringstream in(saved);
          torch::load(optimizer, in);
        }
        optimizer.zero_grad();
        Backward(weight, static_cast<int>(step));
        optimizer.step();
        const auto& state = static_cast<const torch::optim::AdamParamState&>(
            *optimizer.state().at(weight.unsafeGetTensorImpl()));
        EXPECT_EQ(state.step(), static_cast<std::int64_t>(step) + 1);
        std::ostringstream out;
        torch::save(optimizer, out);
        saved = out.str();
      }
      return weight;
    };
    const auto own = train({false, false, false, false});
    EXPECT_LT(Distance({train({true, false, true, false})}, {own}), 1e-6);
    EXPECT_LT(Distance({train({false, true, false, true})}, {own}), 1e-6);
  });
}

TEST(FusedStepTest, AClosureIsCalledOnceAndAutogradSeesTheStep) {
  RunTorchRanks(2, [](int) {
    const torch::Tensor weight = Weight({90});
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(0.1)), Fused());
    int calls = 0;
    const torch::Tensor before = (weight * weight).sum();
    const torch::Tensor loss = optimizer.step([&] {
      ++calls;
      optimizer.zero_grad();
      const torch::Tensor of_closure = (2 * weight).sum();
      of_closure.backward();
      return of_closure;
    });
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(loss.defined());
    EXPECT_TRUE(torch::allclose(weight.grad(), torch::full({90}, 2.0)));
    EXPECT_THROW(before.backward(), c10::Error) << "its weight has another version";
  });
}

// ---- what is refused ----

struct MyAdam : Adam {
  using Adam::Adam;
};

TEST(FusedStepTest, RefusesOtherClassesAndOtherOptionsOnOneRank) {
  RunTorchRanks(2, [](int rank) {
    const auto refusal = [](auto make) { return ErrorOf(ErrorCode::InvalidArgument, make); };
    EXPECT_THAT(
        refusal([] { DistributedOptimizer(torch::optim::RMSprop({Weight({3})}), Fused()); }),
        HasSubstr("Adagrad, Adam, AdamW and SGD"));
    EXPECT_THAT(refusal([] {
                  DistributedOptimizer(MyAdam(std::vector<torch::Tensor>{Weight({3})}), Fused());
                }),
                HasSubstr("leave out the option fused"));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          DistributedOptimizer(SGD({Weight({3})}, SGDOptions(1)),
                                               rank == 0 ? Fused() : DistributedOptimizerOptions());
                        }),
                HasSubstr("by fused steps"));
  });
}

TEST(FusedStepTest, RefusesSparseGradientsAndParametersThatAreNotDenseBeforeAnythingChanges) {
  RunTorchRanks(1, [](int) {
    const torch::Tensor plain = Weight({5});
    const auto refusal = [&](const torch::Tensor& weight, auto backward) {
      auto optimizer = DistributedOptimizer(SGD({plain, weight}, SGDOptions(1)), Fused());
      const torch::Tensor before = plain.detach().clone();
      Backward(plain, 0);
      backward();
      const std::string text = ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); });
      EXPECT_TRUE(torch::equal(plain, before));
      return text;
    };
    const torch::Tensor rows = Weight({40, 2});
    EXPECT_THAT(refusal(rows,
                        [&] {
                          torch::embedding(rows, torch::tensor({1}), -1, false, /*sparse=*/true)
                              .sum()
                              .backward();
                        }),
                HasSubstr("sparse_as_dense"));
    const torch::Tensor holes = torch::zeros({40, 2}).select(1, 0).requires_grad_();
    EXPECT_THAT(refusal(holes, [&] { Backward(holes, 0); }), HasSubstr("contiguous"));
  });
}

// The operators would write behind the end of its memory.
TEST(FusedStepTest, RefusesStateThatIsNotLikeItsParameter) {
  RunTorchRanks(1, [](int) {
    const auto saved = [](const torch::Tensor& weight) {
      Adam adam({weight}, AdamOptions(0.1));
      Backward(weight, 0);
      adam.step();
      std::stringstream file;
      torch::save(adam, file);
      return file.str();
    };
    for (const auto& other : {Weight({10}), Weight({5000}, torch::kDouble)}) {
      const torch::Tensor weight = Weight({5000});
      const torch::Tensor before = weight.detach().clone();
      auto optimizer = DistributedOptimizer(Adam({weight}, AdamOptions(0.1)), Fused());
      std::istringstream file(saved(other));
      torch::load(optimizer, file);
      Backward(weight, 1);
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                  HasSubstr("has state of"));
      EXPECT_TRUE(torch::equal(weight, before));
      optimizer.state().clear();
      optimizer.step();
      EXPECT_FALSE(torch::equal(weight, before));
    }
  });
}

// The second step of a parameter that stands twice begins where the first has led.
TEST(FusedStepTest, AParameterThatStandsTwiceStepsTwice) {
  RunTorchRanks(1, [](int) {
    const auto train = [](const auto& make, bool fused) {
      const torch::Tensor weight = Weight({7});
      auto optimizer = make(std::vector<torch::Tensor>{weight, Weight({3}), weight}, fused);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        Backward(weight, step);
        optimizer.step();
      }
      return std::vector<torch::Tensor>{weight.detach()};
    };
    const auto sgd = [](const std::vector<torch::Tensor>& weights, bool fused) {
      return DistributedOptimizer(SGD(weights, SGDOptions(0.1).momentum(0.9).dampening(0.3)),
                                  DistributedOptimizerOptions().fused(fused));
    };
    const auto adam = [](const std::vector<torch::Tensor>& weights, bool fused) {
      return DistributedOptimizer(Adam(weights, AdamOptions(0.01)),
                                  DistributedOptimizerOptions().fused(fused));
    };
    EXPECT_LT(Distance(train(sgd, true), train(sgd, false)), 1e-6);
    EXPECT_LT(Distance(train(adam, true), train(adam, false)), 1e-6);
  });
}

}  // namespace
}  // namespace sirtaki::tests
