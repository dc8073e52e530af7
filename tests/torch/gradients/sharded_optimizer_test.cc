// An optimizer whose state is sharded makes the steps of one that is not, to the bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "frameworks/torch/gradients/optimizer_shards.h"
#include "sirtaki/broadcast.h"
#include "sirtaki/check_parameters.h"
#include "sirtaki/collectives.h"
#include "sirtaki/optimizer.h"
#include "tests/torch/gradients/training_habits.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Sharing = session::InprocWorld::Sharing;

DistributedOptimizerOptions Sharded() {
  return DistributedOptimizerOptions().shard(Shard::OptimizerState);
}

torch::Tensor Weight(torch::IntArrayRef shape, double phase = 0) {
  return Waves(shape, phase).to(torch::kFloat).requires_grad_();
}

// A gradient without a pattern, another one on each rank.
void Backward(const torch::Tensor& weight, int rank, int step) {
  (weight * Waves(weight.sizes(), 3.0 * rank + 7.0 * step).to(weight.dtype())).sum().backward();
}

std::int64_t ElementsOfState(const torch::optim::Optimizer& optimizer) {
  std::int64_t elements = 0;
  for (const auto& [parameter, state] : optimizer.state()) {
    const auto* const adam = dynamic_cast<const torch::optim::AdamParamState*>(state.get());
    if (adam != nullptr) elements += adam->exp_avg().numel() + adam->exp_avg_sq().numel();
  }
  return elements;
}

// ---- as one that is not sharded ----

class ShardedHabitsTest : public testing::TestWithParam<std::tuple<habits::Kind, habits::Habit>> {};

TEST_P(ShardedHabitsTest, MakesTheStepsOfOneThatIsNot) {
  const auto [kind, habit] = GetParam();
  const std::vector<std::pair<int, Sharing>> worlds = {
      {1, Sharing::kNone}, {3, Sharing::kNone}, {2, Sharing::kDirect}, {2, Sharing::kPooled}};
  for (const auto& [size, sharing] : worlds) {
    const Average average = sharing == Sharing::kPooled ? Average::Step : Average::Backward;
    const auto train = [&, kind = kind, habit = habit](int rank) {
      const auto options = DistributedOptimizerOptions().average_at(average);
      const auto whole = habits::TrainAsRank(kind, habit, rank, options);
      const auto sharded = habits::TrainAsRank(
          kind, habit, rank, DistributedOptimizerOptions(options).shard(Shard::OptimizerState));
      EXPECT_GT(Distance(sharded, habits::HabitNet().parameters()), 1e-3) << "it learns";
      EXPECT_EQ(Distance(sharded, whole), 0) << "rank " << rank;
      // Two optimizers cannot both keep the shards of one gradient.
      if (habit == habits::Habit::kTwoOfTheSame) return;
      const auto of_gradients = habits::TrainAsRank(
          kind, habit, rank, DistributedOptimizerOptions(options).shard(Shard::Gradients));
      // The norm is added up in another order.
      EXPECT_LE(Distance(of_gradients, whole),
                habit == habits::Habit::kClip ? habits::ToleranceOf(kind) : 0)
          << "rank " << rank << ", shards of gradients";
    };
    RunTorchRanks(size, train, habits::Deterministic(), {}, sharing);
  }
}

using habits::Habit;
using habits::Kind;
INSTANTIATE_TEST_SUITE_P(
    All, ShardedHabitsTest,
    testing::Combine(testing::Values(Kind::kNesterov, Kind::kAdamW, Kind::kAdagrad),
                     testing::Values(Habit::kPlain, Habit::kZeroInPlace, Habit::kAccumulate,
                                     Habit::kNoSync, Habit::kClip, Habit::kFreeze, Habit::kUnused,
                                     Habit::kTwoParts, Habit::kTwoOfTheSame)),
    habits::NameOf);
INSTANTIATE_TEST_SUITE_P(Plain, ShardedHabitsTest,
                         testing::Combine(testing::Values(Kind::kMomentum, Kind::kAdam,
                                                          Kind::kRmsProp),
                                          testing::Values(Habit::kPlain)),
                         habits::NameOf);

TEST(ShardedOptimizerTest, EveryTypeAndLayout) {
  const std::vector<torch::ScalarType> types = {torch::kFloat, torch::kDouble, torch::kHalf,
                                                torch::kBFloat16};
  for (const torch::ScalarType type : types) {
    RunTorchRanks(
        3,
        [&](int rank) {
          const auto make = [&](const DistributedOptimizerOptions& options) {
            const auto images = Weight({4, 3, 5, 5})
                                    .detach()
                                    .to(type)
                                    .contiguous(torch::MemoryFormat::ChannelsLast);
            const auto columns = Weight({31, 9}, 1).detach().to(type).t();
            // The last one is too large to travel with the others.
            std::vector<torch::Tensor> weights = {images, columns, Weight({1}, 2).detach().to(type),
                                                  torch::zeros({0}, type),
                                                  Weight({130, 141}, 3).detach().to(type).t()};
            for (torch::Tensor& weight : weights) weight.requires_grad_();
            auto optimizer = DistributedOptimizer(Adam(weights, AdamOptions(0.01)), options);
            for (int step = 0; step < 5; ++step) {
              optimizer.zero_grad();
              for (const torch::Tensor& weight : weights) Backward(weight, rank, step);
              optimizer.step();
            }
            return weights;
          };
          const auto whole = make(DistributedOptimizerOptions());
          const auto sharded = make(Sharded());
          for (std::size_t i = 0; i < whole.size(); ++i) {
            EXPECT_TRUE(torch::equal(sharded[i], whole[i])) << type << " " << i;
            EXPECT_EQ(sharded[i].strides(), whole[i].strides());
          }
        },
        habits::Deterministic());
  }
}

// ---- who has what ----

TEST(ShardedOptimizerTest, TheOptionOfTheJobGoesBeforeWhatTheProgramSays) {
  for (const auto& [job, program, are_sharded] :
       {std::tuple{core::ShardMode::kOptimizer, Shard::None, true},
        {core::ShardMode::kGradients, Shard::OptimizerState, true},
        {core::ShardMode::kNone, Shard::Gradients, false}}) {
    core::Config config;
    config.shard = job;
    RunTorchRanks(
        2,
        [&, job = job, program = program, are_sharded = are_sharded](int rank) {
          const torch::Tensor weight = Weight({9000});
          auto optimizer = DistributedOptimizer(Adam({weight}, AdamOptions(0.1)),
                                                DistributedOptimizerOptions().shard(program));
          Backward(weight, rank, 0);
          EXPECT_EQ(weight.grad().defined(), job != core::ShardMode::kGradients);
          optimizer.step();
          EXPECT_EQ(ElementsOfState(optimizer) < 2 * weight.numel(), are_sharded);
        },
        config);
  }
}

TEST(ShardedOptimizerTest, OverHostsEachHostHasEverythingOnce) {
  for (const std::vector<int>& host_of_rank : {std::vector{0, 0, 1, 1}, {0, 1, 0}}) {
    const int size = static_cast<int>(host_of_rank.size());
    for (const auto& [shard, habit] : {std::pair{Shard::OptimizerState, Habit::kPlain},
                                       {Shard::Gradients, Habit::kPlain},
                                       {Shard::Gradients, Habit::kClip}}) {
      RunTorchRanks(
          size,
          [&, shard = shard, habit = habit](int rank) {
            const auto whole = habits::TrainAsRank(Kind::kAdamW, habit, rank);
            const auto sharded = habits::TrainAsRank(
                Kind::kAdamW, habit, rank,
                DistributedOptimizerOptions().shard(shard).shard_over(ShardOver::Host));
            const double distance = Distance(sharded, whole);
            // The norm is added up in another order.
            EXPECT_LE(distance, habit == Habit::kClip ? habits::ToleranceOf(Kind::kAdamW) : 0);
            const torch::Tensor distances = allgather(torch::full({1}, distance, torch::kDouble));
            EXPECT_TRUE(torch::equal(distances, distances[0].expand_as(distances)));
          },
          habits::Deterministic(), host_of_rank);
    }
    RunTorchRanks(
        size,
        [&](int rank) {
          const torch::Tensor weight = Weight({9000});
          auto optimizer = DistributedOptimizer(Adam({weight}, AdamOptions(0.1)),
                                                Sharded().shard_over(ShardOver::Host));
          Backward(weight, rank, 0);
          optimizer.step();
          const auto elements = torch::full({1}, ElementsOfState(optimizer), torch::kLong);
          EXPECT_EQ(allreduce(elements, AllreduceOptions().op(ReduceOp::Sum)).item<std::int64_t>(),
                    2 * 2 * weight.numel());
          const auto all = add_process_set({0, 1, 2});
          if (!all.included()) return;
          EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                              [&] {
                                DistributedOptimizer(
                                    Adam({Weight({9})}, AdamOptions(0.1)),
                                    Sharded().shard_over(ShardOver::Host).process_set(all));
                              }),
                      HasSubstr("need all ranks of the job"));
        },
        {}, host_of_rank);
  }
}

TEST(CutShardsTest, BeginAtMultiplesOf128Bytes) {
  using detail::CutShards;
  EXPECT_THAT(CutShards(100, 8, 3, 0, ShardBy::Element), ElementsAre(0, 32, 64, 100));
  EXPECT_THAT(CutShards(48, 8, 3, 1, ShardBy::Element), ElementsAre(0, 16, 32, 48));
  EXPECT_THAT(CutShards(47, 8, 3, 1, ShardBy::Element), ElementsAre(0, 0, 47, 47));
  EXPECT_THAT(CutShards(200, 2, 2, 1, ShardBy::Element), ElementsAre(0, 64, 200));
  EXPECT_THAT(CutShards(100, 8, 3, 2, ShardBy::Parameter), ElementsAre(0, 0, 0, 100));
  EXPECT_THAT(CutShards(0, 8, 2, 0, ShardBy::Element), ElementsAre(0, 0, 0));
}

TEST(ShardedOptimizerTest, EachRankHasTheStateOfItsShards) {
  RunTorchRanks(4, [](int rank) {
    std::vector<torch::Tensor> weights = {Weight({64, 64}), Weight({64}, 1)};
    for (int i = 0; i < 8; ++i) weights.push_back(Weight({10}, i));
    auto optimizer = DistributedOptimizer(Adam(weights, AdamOptions(0.1)), Sharded());
    for (const torch::Tensor& weight : weights) Backward(weight, rank, 0);
    optimizer.step();
    const std::vector<std::int64_t> small = {64, 30, 30, 20};
    EXPECT_EQ(ElementsOfState(optimizer),
              2 * (64 * 64 / 4 + small[static_cast<std::size_t>(rank)]));
    EXPECT_EQ(optimizer.param_groups()[0].params().size(), weights.size()) << "the program's";
    EXPECT_TRUE(weights[0].grad().defined());
  });
}

// Its step looks at whole matrices.
struct NormedDescent : SGD {
  using SGD::SGD;
  torch::Tensor step(LossClosure) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (torch::Tensor& parameter : group.params()) {
        if (parameter.grad().defined()) parameter.sub_(parameter.grad() / parameter.grad().norm());
      }
    }
    return {};
  }
};

TEST(ShardedOptimizerTest, AnOptimizerOfOnesOwnGetsWholeParameters) {
  RunTorchRanks(2, [](int rank) {
    const auto train = [&](const DistributedOptimizerOptions& options) {
      const std::vector<torch::Tensor> weights = {Weight({40, 3}), Weight({40}, 1)};
      auto optimizer = DistributedOptimizer(NormedDescent(weights, SGDOptions(1)), options);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        for (const torch::Tensor& weight : weights) Backward(weight, rank, step);
        optimizer.step();
      }
      return weights;
    };
    EXPECT_EQ(Distance(train(Sharded()), train({})), 0);
  });
}

TEST(ShardedOptimizerTest, HybridWithinAProcessSetOfOneOptimizerEach) {
  RunTorchRanks(4, [](int rank) {
    const ProcessSet low = add_process_set({0, 1});
    const ProcessSet high = add_process_set({2, 3});
    const torch::Tensor weight = Weight({100});
    auto optimizer = DistributedOptimizer(Adam({weight}, AdamOptions(0.1)),
                                          Sharded().process_set(rank < 2 ? low : high));
    Backward(weight, rank, 0);
    optimizer.step();
    EXPECT_EQ(ElementsOfState(optimizer), rank % 2 == 0 ? 2 * 32 : 2 * 68);
    check_parameters({{"weight", weight}}, rank < 2 ? low : high);
  });
}

// ---- what changes under way ----

TEST(ShardedOptimizerTest, ParametersComeGoAndMove) {
  RunTorchRanks(2, [](int rank) {
    const auto train = [&](const DistributedOptimizerOptions& options) {
      std::vector<torch::Tensor> weights = {Weight({100}), Weight({100}, 1)};
      auto optimizer = DistributedOptimizer(Adam(weights, AdamOptions(0.1)), options);
      for (int step = 0; step < 8; ++step) {
        if (step == 2) weights[0].set_data(weights[0].detach().clone());
        if (step == 4) {
          weights.push_back(Weight({7, 5}, 2));
          optimizer.add_param_group(torch::optim::OptimizerParamGroup({weights.back()}));
        }
        if (step == 6)
          optimizer.param_groups()[0].params().erase(optimizer.param_groups()[0].params().begin());
        optimizer.zero_grad();
        for (const torch::Tensor& weight : weights) Backward(weight, rank, step);
        optimizer.step();
      }
      if (options.shard() != Shard::None) {
        EXPECT_EQ(ElementsOfState(optimizer), rank == 0 ? 2 * (32 + 32 + 35) : 2 * (68 + 68));
      }
      return weights;
    };
    EXPECT_EQ(Distance(train(Sharded()), train({})), 0);
  });
}

TEST(ShardedOptimizerTest, StateOfWholeParametersIsCut) {
  RunTorchRanks(2, [](int rank) {
    const auto train = [&](const DistributedOptimizerOptions& options) {
      const torch::Tensor weight = Weight({9, 10});
      Adam adam({weight}, AdamOptions(0.1));
      for (int step = 0; step < 2; ++step) {
        adam.zero_grad();
        Backward(weight, 5, step);
        adam.step();
      }
      auto optimizer = DistributedOptimizer(std::move(adam), options);
      for (int step = 2; step < 5; ++step) {
        optimizer.zero_grad();
        Backward(weight, rank, step);
        optimizer.step();
      }
      return std::vector<torch::Tensor>{weight};
    };
    EXPECT_EQ(Distance(train(Sharded()), train({})), 0);
  });
}

TEST(ShardedOptimizerTest, StateIsBroadcastAndLoadedUntilItIsCut) {
  RunTorchRanks(2, [](int rank) {
    const torch::Tensor weight = Weight({90});
    const torch::Tensor alone = Weight({90});
    Adam of_alone({alone}, AdamOptions(0.1));
    if (rank == 0) {
      Backward(alone, 5, 0);
      of_alone.step();
    }
    std::stringstream file;
    torch::save(of_alone, file);
    auto optimizer = DistributedOptimizer(Adam({weight}, AdamOptions(0.3)), Sharded());
    if (rank == 0) torch::load(optimizer, file);
    broadcast_optimizer_state(optimizer, 0);
    broadcast_parameters({{"weight", alone}}, 0);
    {
      const torch::NoGradGuard no_grad;
      weight.copy_(alone);
    }
    broadcast_optimizer_state(of_alone, 0);
    Backward(weight, 9, 1);
    optimizer.step();
    of_alone.zero_grad();
    Backward(alone, 9, 1);
    of_alone.step();
    EXPECT_TRUE(torch::equal(weight, alone));

    const std::string refused =
        ErrorOf(ErrorCode::InvalidArgument, [&] { torch::save(optimizer, file); });
    EXPECT_THAT(refused, HasSubstr("this rank has the state of its shards only"));
    auto& options = static_cast<AdamOptions&>(optimizer.param_groups()[0].options());
    options.lr(rank == 0 ? 0.5 : 0.7);
    broadcast_optimizer_state(optimizer, 0);
    EXPECT_EQ(options.lr(), 0.5);
    EXPECT_EQ(ElementsOfState(optimizer), rank == 0 ? 2 * 32 : 2 * 58) << "it stays where it was";
  });
}

TEST(ShardedOptimizerTest, StateThatTheRootHasLoadedAfterAStepIsBroadcast) {
  RunTorchRanks(2, [](int rank) {
    const auto train = [rank](const DistributedOptimizerOptions& options) {
      const torch::Tensor weight = Weight({90});
      Adam other({Weight({90}, 5)}, AdamOptions(0.1));
      Backward(other.param_groups()[0].params()[0], 3, 3);
      other.step();
      std::stringstream file;
      torch::save(other, file);
      auto optimizer = DistributedOptimizer(Adam({weight}, AdamOptions(0.1)), options);
      Backward(weight, rank, 0);
      optimizer.step();
      if (rank == 0) {
        if (options.shard() == Shard::None) optimizer.state().clear();
        torch::load(optimizer, file);
      }
      broadcast_optimizer_state(optimizer, 0);
      optimizer.zero_grad();
      Backward(weight, rank, 1);
      optimizer.step();
      return std::vector<torch::Tensor>{weight};
    };
    EXPECT_EQ(Distance(train(Sharded()), train({})), 0);
  });
}

TEST(ShardedOptimizerTest, ARootWithShardsGivesNothingToARankThatHasLoaded) {
  RunTorchRanks(2, [](int rank) {
    const torch::Tensor weight = Weight({90});
    auto optimizer = DistributedOptimizer(Adam({weight}, AdamOptions(0.1)), Sharded());
    std::stringstream file;
    torch::save(optimizer, file);
    Backward(weight, rank, 0);
    optimizer.step();
    if (rank == 1) torch::load(optimizer, file);
    EXPECT_THAT(
        ErrorOf(ErrorCode::InvalidArgument, [&] { broadcast_optimizer_state(optimizer, 0); }),
        HasSubstr("the root has the state of its shards only"));
  });
}

TEST(ShardedOptimizerTest, AParameterThatComesBackFindsItsState) {
  RunTorchRanks(2, [](int rank) {
    const auto train = [rank](const DistributedOptimizerOptions& options) {
      std::vector<torch::Tensor> weights = {Weight({100}), Weight({90}, 1), Weight({7}, 2)};
      auto optimizer = DistributedOptimizer(torch::optim::Adagrad(weights, 0.1), options);
      for (int step = 0; step < 6; ++step) {
        auto& parameters = optimizer.param_groups()[0].params();
        if (step == 2) parameters.erase(parameters.begin());
        if (step == 4) parameters.push_back(weights[0]);
        for (const torch::Tensor& weight : weights) weight.mutable_grad().reset();
        for (const torch::Tensor& weight : parameters) Backward(weight, rank, step);
        optimizer.step();
      }
      return weights;
    };
    EXPECT_EQ(Distance(train(Sharded()), train({})), 0);
  });
}

TEST(ShardedOptimizerTest, AutogradSeesThatTheShardsOfOthersWereWritten) {
  RunTorchRanks(2, [](int rank) {
    const torch::Tensor weight = Weight({90});
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(0.1)), Sharded());
    Backward(weight, rank, 0);
    const torch::Tensor loss = (weight * weight).sum();
    optimizer.step();
    EXPECT_THROW(loss.backward(), c10::Error);
  });
}

// ---- what is refused ----

TEST(ShardedOptimizerTest, RefusesLbfgs) {
  RunTorchRanks(2, [](int) {
    EXPECT_THAT(
        ErrorOf(ErrorCode::InvalidArgument,
                [] { DistributedOptimizer(torch::optim::LBFGS({Weight({3})}), Sharded()); }),
        HasSubstr("LBFGS"));
  });
}

TEST(ShardedOptimizerTest, RefusesAdasumAndOtherOptionsOnOneRank) {
  RunTorchRanks(2, [](int rank) {
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [] {
                          DistributedOptimizer(SGD({Weight({3})}, SGDOptions(1)),
                                               Sharded().op(ReduceOp::Adasum));
                        }),
                HasSubstr("Adasum"));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          DistributedOptimizer(
                              SGD({Weight({3})}, SGDOptions(1)),
                              rank == 0 ? Sharded() : DistributedOptimizerOptions());
                        }),
                HasSubstr("sharded"));
  });
}

TEST(ShardedOptimizerTest, RefusesSparseGradientsAndParametersThatAreNotDense) {
  RunTorchRanks(2, [](int rank) {
    const torch::Tensor weight = Weight({40, 2});
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1)), Sharded());
    torch::embedding(weight, torch::tensor({rank}), -1, false, /*sparse=*/true).sum().backward();
    EXPECT_THROW(optimizer.step(), std::invalid_argument);

    const torch::Tensor holes = torch::zeros({40, 2}).select(1, 0).requires_grad_();
    auto other = DistributedOptimizer(SGD({holes}, SGDOptions(1)), Sharded());
    Backward(holes, rank, 0);
    EXPECT_THROW(other.step(), std::invalid_argument);

    EXPECT_THAT(
        ErrorOf(ErrorCode::InvalidArgument,
                [] {
                  const torch::Tensor one = Weight({40});
                  const torch::Tensor part = one.detach().narrow(0, 1, 20);
                  DistributedOptimizer(SGD({one, part.requires_grad_()}, SGDOptions(1)), Sharded());
                }),
        HasSubstr("in the same memory, not of the same elements"));
  });
}

// One rank steps both: what the other's step has made would be lost.
TEST(ShardedOptimizerTest, ParametersOfOneMemory) {
  for (const ShardBy by : {ShardBy::Parameter, ShardBy::Element}) {
    for (const std::int64_t count : {std::int64_t{10}, std::int64_t{1000}}) {
      RunTorchRanks(3, [by, count](int rank) {
        const torch::Tensor one = torch::zeros({count}).requires_grad_();
        const torch::Tensor same = one.detach().view({2, -1}).requires_grad_();
        auto optimizer =
            DistributedOptimizer(SGD({one, same}, SGDOptions(1)), Sharded().shard_by(by));
        (one.sum() * rank + same.sum() * 10).backward();
        optimizer.step();
        EXPECT_TRUE(torch::equal(one.detach(), torch::full({count}, -11.0F)));
      });
    }
  }
}

TEST(ShardedOptimizerTest, RefusesOtherShardsOrMemoryFormatsOnOneRank) {
  RunTorchRanks(2, [](int rank) {
    const auto images = torch::zeros({4, 3, 5, 5})
                            .contiguous(rank == 0 ? torch::MemoryFormat::Contiguous
                                                  : torch::MemoryFormat::ChannelsLast);
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          DistributedOptimizer(SGD({images.requires_grad_()}, SGDOptions(1)),
                                               Sharded());
                        }),
                HasSubstr("strides 75 25 5 1"));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          DistributedOptimizer(
                              SGD({Weight({3})}, SGDOptions(1)),
                              Sharded().shard_by(rank == 0 ? ShardBy::Auto : ShardBy::Parameter));
                        }),
                HasSubstr("sharded by parameter"));
  });
}

TEST(ShardedOptimizerTest, AParameterThatOneRankHasChangedIsAnErrorOnAll) {
  const std::vector<std::function<void(torch::Tensor)>> changes = {
      [](torch::Tensor weight) {
        weight.set_data(torch::zeros({5, 8}).t());
      },
      [](torch::Tensor weight) {
        weight.set_data(torch::zeros({2, 8, 5}).select(2, 0));
      },
  };
  for (const auto& change : changes) {
    RunTorchRanks(2, [&](int rank) {
      const torch::Tensor weight = Weight({8, 5});
      const torch::Tensor other = Weight({90});
      auto optimizer = DistributedOptimizer(SGD({weight, other}, SGDOptions(1)), Sharded());
      Backward(weight, rank, 0);
      optimizer.step();
      optimizer.zero_grad();
      Backward(other, rank, 0);
      if (rank == 1) change(weight);
      if (rank == 1) {
        EXPECT_THROW(optimizer.step(), std::invalid_argument);
      } else {
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                    HasSubstr("in memory"));
      }
    });
  }
}

TEST(ShardedOptimizerTest, ARankWithoutAnyGradientDoesNotLetTheOthersWait) {
  RunTorchRanks(2, [](int rank) {
    for (const bool common : {true, false}) {
      const torch::Tensor weight = Weight({90});
      auto optimizer =
          DistributedOptimizer(SGD({weight}, SGDOptions(1)), Sharded().share_parameters(common));
      Backward(weight, rank, 0);
      const auto scope = optimizer.skip_synchronize();
      if (rank == 1) weight.mutable_grad().reset();
      const auto code = common ? ErrorCode::Mismatch : ErrorCode::InvalidArgument;
      EXPECT_THAT(ErrorOf(code, [&] { optimizer.step(); }),
                  HasSubstr(common ? "gradients of different parameters" : "do not fit"));
      weight.mutable_grad().reset();
      optimizer.step();  // nobody has one
    }
  });
}

TEST(ShardedOptimizerTest, StateThatAFailedStepHasCutIsNotSaved) {
  RunTorchRanks(2, [](int rank) {
    const std::vector<torch::Tensor> weights = {Weight({90}), Weight({40, 2}, 1)};
    Adam adam(weights, AdamOptions(0.1));
    for (const torch::Tensor& weight : weights) Backward(weight, 0, 0);
    adam.step();
    auto optimizer = DistributedOptimizer(std::move(adam), Sharded());
    optimizer.zero_grad();
    Backward(weights[0], rank, 0);
    torch::embedding(weights[1], torch::tensor({rank}), -1, false, /*sparse=*/true)
        .sum()
        .backward();
    EXPECT_THROW(optimizer.step(), std::invalid_argument);
    EXPECT_EQ(ElementsOfState(optimizer), 2 * 170) << "nothing was cut";
    std::stringstream file;
    torch::save(optimizer, file);
  });
}

struct ThrowsOnRank1 : NormedDescent {
  using NormedDescent::NormedDescent;
  int rank = 0;
  torch::Tensor step(LossClosure closure) override {
    if (rank == 1) throw std::runtime_error("out of luck");
    return NormedDescent::step(std::move(closure));
  }
};

TEST(ShardedOptimizerTest, AStepThatThrowsOnOneRankIsAnErrorOnAll) {
  RunTorchRanks(3, [](int rank) {
    const torch::Tensor weight = Weight({90});
    ThrowsOnRank1 base({weight}, SGDOptions(1));
    base.rank = rank;
    auto optimizer = DistributedOptimizer(std::move(base), Sharded());
    Backward(weight, rank, 0);
    if (rank == 1) {
      EXPECT_THROW(optimizer.step(), std::runtime_error);
    } else {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                  HasSubstr("out of luck"));
    }
    EXPECT_TRUE(optimizer.param_groups()[0].params()[0].is_same(weight));
  });
}

// In every way in which shards are kept, and gradients come together.
TEST(ShardedOptimizerTest, RefusesToGoOnWithoutARankThatHasJoined) {
  const std::vector<std::pair<DistributedOptimizerOptions, std::vector<int>>> ways = {
      {Sharded(), {}},
      {Sharded().share_parameters(false), {}},
      {Sharded().average_at(Average::Step), {}},
      {Sharded().shard(Shard::Gradients), {}},
      {Sharded().shard(Shard::Gradients).average_at(Average::Step), {}},
      {Sharded(), {0, 1, 1}},
      {Sharded().shard_over(ShardOver::Host), {0, 1, 1}},
      {Sharded().shard(Shard::Gradients).shard_over(ShardOver::Host), {0, 0, 1}},
  };
  for (std::size_t way = 0; way < ways.size(); ++way) {
    SCOPED_TRACE("way " + std::to_string(way));
    RunTorchRanks(
        3,
        [&, options = ways[way].first](int rank) {
          const torch::Tensor weight = Weight({400});
          auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1)), options);
          Backward(weight, rank, 0);
          optimizer.step();
          if (rank < 2) {
            const torch::Tensor before = weight.detach().clone();
            optimizer.zero_grad();
            Backward(weight, rank, 1);
            EXPECT_THAT(
                ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                testing::AllOf(HasSubstr("rank 2 has joined"), HasSubstr("DistributedSampler")));
            EXPECT_TRUE(torch::equal(weight, before));
          }
          join();
          optimizer.zero_grad();
          const torch::Tensor before = weight.detach().clone();
          Backward(weight, rank, 2);
          optimizer.step();
          EXPECT_FALSE(torch::equal(weight, before)) << "the job goes on";
          check_parameters({{"weight", weight}});
        },
        {}, ways[way].second);
  }
}

// Its join() waits for ranks that do not come any more.
TEST(ShardedOptimizerTest, ARankThatHasJoinedIsToldWhenTheOthersEndByTheError) {
  RunTorchRanks(3, [](int rank) {
    const torch::Tensor weight = Weight({90});
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1)), Sharded());
    if (rank == 1) {
      try {
        join();
        ADD_FAILURE() << "nobody else has joined";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("has shut down"));
      }
      return;
    }
    Backward(weight, rank, 1);
    EXPECT_THROW(optimizer.step(), Error);
  });
}

TEST(ShardedOptimizerTest, ARankThatJoinsInThePlaceOfAStepIsAnErrorAndTheJobGoesOn) {
  RunTorchRanks(3, [](int rank) {
    const torch::Tensor weight = Weight({100});
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1)), Sharded());
    Backward(weight, rank, 0);
    if (rank == 2) {
      join();
    } else {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                  HasSubstr("rank 2 has joined"));
      join();
    }
    broadcast_parameters({{"weight", weight}}, 0);
    optimizer.zero_grad();
    Backward(weight, rank, 1);
    optimizer.step();
    check_parameters({{"weight", weight}});
  });
}

// Its step removes a group, which the end of it must not look for.
struct DropsAGroup : SGD {
  using SGD::SGD;
  torch::Tensor step(LossClosure) override {
    param_groups().pop_back();
    return {};
  }
};

TEST(ShardedOptimizerTest, AStepMayRemoveAGroup) {
  RunTorchRanks(2, [](int rank) {
    DropsAGroup base({Weight({90})}, SGDOptions(1));
    base.add_param_group(torch::optim::OptimizerParamGroup({Weight({80})}));
    auto optimizer = DistributedOptimizer(std::move(base), Sharded());
    Backward(optimizer.param_groups()[0].params()[0], rank, 0);
    optimizer.step();
    EXPECT_EQ(optimizer.param_groups().size(), 1);
    EXPECT_EQ(optimizer.param_groups()[0].params()[0].numel(), 90);
  });
}

}  // namespace
}  // namespace sirtaki::tests
