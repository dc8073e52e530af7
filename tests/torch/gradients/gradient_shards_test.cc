// An optimizer with shards of gradients makes the steps of one without, whatever gradients are like
// and whoever shares their memory, or throws on all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "sirtaki/broadcast.h"
#include "sirtaki/collectives.h"
#include "sirtaki/grad_scaler.h"
#include "sirtaki/optimizer.h"
#include "tests/torch/gradients/training_habits.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests::of_gradients {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Sharing = session::InprocWorld::Sharing;
using Weights = std::vector<torch::Tensor>;

DistributedOptimizerOptions OfGradients() {
  return DistributedOptimizerOptions().shard(Shard::Gradients);
}

torch::Tensor Weight(torch::IntArrayRef shape, double phase = 0) {
  return Waves(shape, phase).to(torch::kFloat).requires_grad_();
}

torch::Tensor Loss(const torch::Tensor& weight, int rank, int step) {
  return (weight * Waves(weight.sizes(), 3.0 * rank + 7.0 * step).to(weight.dtype())).sum();
}

// Makes backward() passes of a step.
using Passes = std::function<void(const Weights& weights, int rank, int step)>;

// Trains with shards of gradients and without, in all ways in which memory may be shared.
void ExpectAsWithout(const std::function<Weights()>& make, const Passes& passes,
                     const DistributedOptimizerOptions& options = {}) {
  const std::vector<std::pair<int, Sharing>> worlds = {{2, Sharing::kDirect},
                                                       {3, Sharing::kDirect},
                                                       {4, Sharing::kPooled},
                                                       {3, Sharing::kStaged},
                                                       {2, Sharing::kNone}};
  for (const auto& [size, sharing] : worlds) {
    const auto train_as = [&](int rank) {
      const auto train = [&](const DistributedOptimizerOptions& of) {
        Weights weights = make();
        auto optimizer = DistributedOptimizer(Adam(weights, AdamOptions(0.01)), of);
        for (int step = 0; step < 5; ++step) {
          optimizer.zero_grad();
          passes(weights, rank, step);
          optimizer.step();
        }
        return weights;
      };
      const Weights whole = train(options);
      const Weights sharded = train(DistributedOptimizerOptions(options).shard(Shard::Gradients));
      EXPECT_GT(Distance(sharded, make()), 1e-3) << "it learns";
      EXPECT_EQ(Distance(sharded, whole), 0) << "rank " << rank << " of " << size;
    };
    RunTorchRanks(size, train_as, habits::Deterministic(), {}, sharing);
  }
}

Weights ThreeWeights() { return {Weight({64, 20}), Weight({1280}, 1), Weight({7}, 2)}; }

TEST(GradientShardsTest, GradientsThatShareMemory) {
  // The same tensor for two parameters, one number for all elements, and parts of one.
  ExpectAsWithout(ThreeWeights, [](const Weights& weights, int rank, int step) {
    const torch::Tensor sum = weights[0].view(-1) + weights[1];
    (Loss(sum, rank, step) + weights[2].sum() * (rank + 1)).backward();
  });
  ExpectAsWithout(ThreeWeights, [](const Weights& weights, int rank, int step) {
    (Loss(torch::cat({weights[0].view(-1), weights[1], weights[2]}), rank, step) + weights[1].sum())
        .backward();
  });
  ExpectAsWithout(ThreeWeights, [](const Weights& weights, int rank, int) {
    (weights[0].sum() + 2 * weights[1].mean() + weights[2].sum() * (rank + 1)).backward();
  });
}

TEST(GradientShardsTest, GradientsThatSomebodyElseHolds) {
  std::vector<std::vector<torch::Tensor>> held(4);
  ExpectAsWithout(ThreeWeights, [&](const Weights& weights, int rank, int step) {
    auto& mine = held[static_cast<std::size_t>(rank)];
    mine.clear();
    const torch::Tensor first = weights[0] * 1;
    first.register_hook([&](const torch::Tensor& gradient) { mine.push_back(gradient); });
    weights[1].register_hook([](const torch::Tensor& gradient) { return gradient * 2; });
    (Loss(first, rank, step) + Loss(weights[1], rank, step) + Loss(weights[2], rank, step))
        .backward();
  });
}

TEST(GradientShardsTest, GradientsThatLieOtherwiseThanTheirParameters) {
  const auto make = [] {
    Weights weights = {Weight({4, 30, 5, 5})
                           .detach()
                           .contiguous(torch::MemoryFormat::ChannelsLast)
                           .requires_grad_(),
                       Weight({31, 40}).detach().t().requires_grad_(), Weight({1, 300, 1})};
    return weights;
  };
  const auto passes = [](const Weights& weights, int rank, int step) {
    for (const torch::Tensor& weight : weights) Loss(weight, rank, step).backward();
  };
  ExpectAsWithout(make, passes);
  ExpectAsWithout(
      make,
      [&](const Weights& weights, int rank, int step) {
        passes(weights, rank, step);
        for (const torch::Tensor& weight : weights) {
          if ((rank + step) % 2 == 0) {
            weight.mutable_grad() = weight.grad().contiguous().clone();
          }
        }
      },
      DistributedOptimizerOptions().average_at(Average::Step).backward_passes_per_step(2));
}

TEST(GradientShardsTest, GradientsOfAnotherTypeThanTheirParameters) {
  ExpectAsWithout(
      [] {
        Weights weights;
        for (const torch::Tensor& weight : ThreeWeights()) {
          weights.push_back(weight.detach().to(torch::kBFloat16).requires_grad_());
          weights.back().set_grad_dtype(torch::kFloat);
        }
        return weights;
      },
      [](const Weights& weights, int rank, int step) {
        for (const torch::Tensor& weight : weights) {
          Loss(weight.to(torch::kFloat), rank, step).backward();
          EXPECT_EQ(weight.grad().scalar_type(), torch::kFloat);
        }
      },
      DistributedOptimizerOptions().average_at(Average::Step).backward_passes_per_step(2));
}

TEST(GradientShardsTest, SomeRanksHaveNone) {
  ExpectAsWithout(
      ThreeWeights,
      [](const Weights& weights, int rank, int step) {
        for (std::size_t i = 0; i < weights.size(); ++i) {
          // In the last step nobody has the second.
          if ((static_cast<int>(i) + rank + step) % 3 == 0 || (step == 4 && i == 1)) continue;
          Loss(weights[i], rank, step).backward();
          break;
        }
      },
      DistributedOptimizerOptions().average_at(Average::Step));
}

TEST(GradientShardsTest, AParameterThatChangesItsShapeIsAnErrorOnAll) {
  for (const std::int64_t size : {1, 6}) {
    RunTorchRanks(
        2,
        [&](int rank) {
          const torch::Tensor weight = Weight({4, 400});
          auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(0.1)),
                                                OfGradients().average_at(Average::Step));
          Loss(weight, rank, 0).backward();
          optimizer.step();
          optimizer.zero_grad();
          weight.set_data(torch::ones({size, 400}));
          weight.mutable_grad() = torch::ones({size, 400});
          EXPECT_THROW(optimizer.step(), std::invalid_argument) << "rank " << rank;
        },
        {}, {}, Sharing::kDirect);
  }
}

TEST(GradientShardsTest, AParameterThatCannotBeCutIsAnErrorOnAllEachTime) {
  RunTorchRanks(
      2,
      [](int rank) {
        const torch::Tensor weight = Weight({400});
        auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(0.1)), OfGradients());
        const torch::Tensor holes = Waves({40, 2}, 0).select(1, 0).detach().requires_grad_();
        optimizer.add_param_group(torch::optim::OptimizerParamGroup({holes}));
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.zero_grad(); }),
                    HasSubstr("does not lie dense in memory"));
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                            [&] { (Loss(weight, rank, 1) + Loss(holes, rank, 1)).backward(); }),
                    HasSubstr("cannot be kept in shards"));
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                    HasSubstr("does not lie dense in memory"));
        optimizer.param_groups().pop_back();
        optimizer.zero_grad();
        const torch::Tensor before = weight.detach().clone();
        Loss(weight, rank, 2).backward();
        optimizer.step();
        EXPECT_FALSE(torch::equal(weight, before));
      },
      {}, {}, Sharing::kDirect);
}

// Sums come in another order than without shards.
TEST(GradientShardsTest, RanksOfSeveralHostsAreSentTheirShardsOnly) {
  core::Config config;
  config.small_bytes = 0;
  config.chunk_bytes = 4096;
  config.bucket_bytes = 4096;
  const std::vector<std::vector<int>> worlds = {{0, 0, 1, 1}, {0, 1, 1}, {0, 1}, {0, 1, 2}};
  for (const std::vector<int>& hosts : worlds) {
    std::atomic<int> cut{0};
    const auto note = [&cut](int, const core::RunBatch& batch) {
      for (const core::RunItem& item : batch.items) {
        for (const core::WorkPtr& part : item.work->parts) cut += part->kept && part->kept->cuts;
      }
    };
    const auto train_as = [&](int rank) {
      const auto train = [&](const DistributedOptimizerOptions& options) {
        Weights weights = ThreeWeights();
        auto optimizer = DistributedOptimizer(Adam(weights, AdamOptions(0.01)), options);
        for (int step = 0; step < 6; ++step) {
          optimizer.zero_grad();
          torch::Tensor loss = Loss(weights[0], rank, step) + Loss(weights[1], rank, step);
          // The ranks that have no gradient bring zeros; sometimes nobody has one.
          if (rank == step) loss = loss + Loss(weights[2], rank, step);
          loss.backward();
          optimizer.step();
        }
        return weights;
      };
      EXPECT_LT(Distance(train(OfGradients()), train({})), 1e-5) << "rank " << rank;
    };
    RunTorchRanks(static_cast<int>(hosts.size()), train_as, config, hosts, Sharing::kDirect, note);
    EXPECT_GT(cut, 0) << hosts.size() << " ranks";
  }
}

// Each rank is at a gradient that the others come to later, with more under way than a hook lets be.
TEST(GradientShardsTest, RanksWhoseGradientsComeInOtherOrdersDoNotWaitForEachOther) {
  constexpr std::int64_t kElements = 5 << 20;  // 20 MiB
  RunTorchRanks(2, [](int rank) {
    std::vector<torch::Tensor> weights;
    for (int i = 0; i < 4; ++i) weights.push_back(torch::zeros({kElements}).requires_grad_());
    auto optimizer = DistributedOptimizer(torch::optim::SGD(weights, torch::optim::SGDOptions(1)),
                                          DistributedOptimizerOptions().shard(Shard::Gradients));
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      torch::Tensor loss = torch::zeros({});
      for (int i = 0; i < 4; ++i) {
        const int which = rank == 0 ? i : 3 - i;
        loss = loss + (weights[static_cast<std::size_t>(which)] * double(which + rank)).sum();
      }
      loss.backward();
      optimizer.step();
    }
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(torch::all(weights[static_cast<std::size_t>(i)] == -2 * (i + 0.5)).item<bool>());
    }
  });
}

TEST(GradientShardsTest, GradientsAreGivenBackWhileBackwardGoesOn) {
  core::Config config;
  config.bucket_bytes = 1;  // a bucket for each gradient
  config.first_bucket_bytes = 1;
  RunTorchRanks(
      2,
      [](int rank) {
        std::vector<torch::Tensor> weights;
        for (int i = 0; i < 6; ++i) weights.push_back(Weight({300}, i));
        auto optimizer = DistributedOptimizer(Adam(weights, AdamOptions(0.01)), OfGradients());
        // A hook of the first layer, which backward() comes to last: what is behind it is reduced.
        int given_back = -1;
        const auto looks = [&](const torch::Tensor& gradient) {
          given_back = 0;
          for (int i = 2; i < 6; ++i) given_back += weights[i].grad().defined() ? 0 : 1;
          return gradient;
        };
        for (int step = 0; step < 4; ++step) {
          optimizer.zero_grad();
          torch::Tensor x = weights[0] * 1.0;
          x.register_hook(looks);
          for (int i = 1; i < 6; ++i) {
            x = x * weights[i];
            // A rank waits here until all ranks have the gradients of the next layers.
            x.register_hook([](const torch::Tensor& gradient) {
              barrier();
              return gradient;
            });
          }
          x.sum().backward();
          for (const auto& weight : weights) EXPECT_FALSE(weight.grad().defined());
          std::int64_t elements = 0;
          const std::vector<torch::Tensor> shards = *optimizer.reducer().gradient_shards();
          for (const torch::Tensor& shard : shards) elements += shard.numel();
          EXPECT_EQ(elements, 6 * (rank == 0 ? 128 : 172));
          optimizer.step();
          EXPECT_TRUE(optimizer.reducer().gradient_shards()->empty());
        }
        // Buckets are there from the second step on.
        EXPECT_GE(given_back, 3);
      },
      config);
}

TEST(GradientShardsTest, AnAverageThatNoStepHasUsedIsNotAddedTo) {
  RunTorchRanks(2, [](int rank) {
    const torch::Tensor weight = Weight({90});
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(0.1)), OfGradients());
    Loss(weight, rank, 0).backward();
    weight.mutable_grad().reset();  // as zero_grad() of a module does it
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { Loss(weight, rank, 1).backward(); }),
                HasSubstr("zero_grad() of the optimizer"));
    optimizer.zero_grad();
    const torch::Tensor before = weight.detach().clone();
    Loss(weight, rank, 2).backward();
    optimizer.step();
    const torch::Tensor average = (Waves({90}, 14.0) + Waves({90}, 17.0)) / 2;
    EXPECT_LT(Distance({before - weight.detach()}, {(0.1 * average).to(torch::kFloat)}), 1e-6);
    // A step that was left out.
    Loss(weight, rank, 3).backward();
    optimizer.skip_step();
    EXPECT_TRUE(optimizer.reducer().gradient_shards()->empty());
    Loss(weight, rank, 4).backward();
    optimizer.step();
  });
}

// The hooks of other gradients do not say it: then the end of backward() would come too late for those
// that had not arrived, and the other rank would learn of a backward() that has thrown.
TEST(GradientShardsTest, AnAverageThatNoStepHasUsedIsAnErrorAtTheEndOfBackward) {
  core::Config config;
  config.bucket_bytes = 0;
  RunTorchRanks(
      2,
      [](int) {
        const Weights weights = {Weight({300}), Weight({300}, 1), Weight({300}, 2)};
        auto optimizer = DistributedOptimizer(SGD(weights, SGDOptions(0.1)), OfGradients());
        int arrived = 0;
        const auto backward = [&] {
          torch::Tensor x = weights[0] * 1.0;
          x.register_hook([&arrived](const torch::Tensor& gradient) {
            ++arrived;
            return gradient;
          });
          for (int i = 1; i < 3; ++i) {
            x = x * weights[i];
            // A rank waits here until all ranks have the gradients of the next layers.
            x.register_hook([](const torch::Tensor& gradient) {
              barrier();
              return gradient;
            });
          }
          x.sum().backward();
        };
        backward();
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, backward),
                    HasSubstr("zero_grad() of the optimizer"));
        EXPECT_EQ(arrived, 2);
        optimizer.zero_grad();
        backward();
        optimizer.step();
      },
      config);
}

TEST(GradientShardsTest, AGradientMadeByHandBesideIsAnErrorOnAll) {
  RunTorchRanks(2, [](int rank) {
    const torch::Tensor weight = Weight({90});
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(0.1)), OfGradients());
    Loss(weight, rank, 0).backward();
    if (rank == 1) weight.mutable_grad() = torch::zeros({90});
    EXPECT_ANY_THROW(optimizer.step());
    optimizer.zero_grad();
    Loss(weight, rank, 1).backward();
    broadcast_parameters({{"weight", weight}}, 0);
    optimizer.step();
  });
}

TEST(GradientShardsTest, ScaledGradientsAreUnscaledAndASkippedStepLetsThemGo) {
  RunTorchRanks(
      3,
      [](int rank) {
        const torch::Tensor whole = Weight({700});
        const torch::Tensor sharded = whole.detach().clone().requires_grad_();
        auto plain = DistributedOptimizer(SGD({whole}, SGDOptions(0.1)));
        auto optimizer = DistributedOptimizer(SGD({sharded}, SGDOptions(0.1)), OfGradients());
        const auto train = [&](auto& base, const torch::Tensor& weight) {
          GradScaler scaler(GradScalerOptions().init_scale(1024));
          std::vector<bool> made;
          for (int step = 0; step < 3; ++step) {
            base.zero_grad();
            torch::Tensor factors = Waves({700}, 3.0 * rank + step).to(torch::kFloat);
            // It is in the shard of rank 2 alone.
            if (step == 1 && rank == 0) factors[699] = std::numeric_limits<float>::infinity();
            scaler.scale((weight * factors).sum()).backward();
            made.push_back(scaler.step(base));
            scaler.update();
          }
          return made;
        };
        EXPECT_THAT(train(plain, whole), ElementsAre(true, false, true));
        EXPECT_THAT(train(optimizer, sharded), ElementsAre(true, false, true));
        EXPECT_EQ(Distance({sharded}, {whole}), 0);
      },
      habits::Deterministic());
}

TEST(GradientShardsTest, RefusesASecondOptimizerOfTheSameParameterAndOtherShardsOnOneRank) {
  RunTorchRanks(2, [](int rank) {
    const torch::Tensor weight = Weight({90});
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1)), OfGradients());
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] { DistributedOptimizer(SGD({weight}, SGDOptions(1)), OfGradients()); }),
                HasSubstr("kept in shards"));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] { clip_grad_norm_(optimizer, 1.0, /*norm_type=*/0); }),
                HasSubstr("above 0"));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          DistributedOptimizer(
                              SGD({Weight({3})}, SGDOptions(1)),
                              DistributedOptimizerOptions().shard(rank == 0 ? Shard::OptimizerState
                                                                            : Shard::Gradients));
                        }),
                HasSubstr("kept in shards"));
  });
}

}  // namespace
}  // namespace sirtaki::tests::of_gradients
