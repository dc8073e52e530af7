// What DistributedOptimizer can be asked for beyond the plain loop.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sirtaki/collectives.h"
#include "sirtaki/optimizer.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Options = DistributedOptimizerOptions;

DistributedOptimizer<SGD> WrapWith(const NamedTensors& names, const Options& options = {}) {
  std::vector<torch::Tensor> parameters;
  for (const auto& [name, tensor] : names) parameters.push_back(tensor);
  return DistributedOptimizer<SGD>(SGD(std::move(parameters), SGDOptions(1.0)), names, options);
}

torch::Tensor OptionZeros(std::int64_t count) {
  return torch::zeros({count}, torch::requires_grad());
}

// A loss whose gradient is `value` everywhere.
torch::Tensor Slope(const torch::Tensor& weight, double value) { return weight.sum() * value; }

float First(const torch::Tensor& weight) { return weight.detach().view(-1)[0].item<float>(); }

// ---- how gradients are reduced ----

TEST(OptimizerOptionsTest, SumOfTheGradients) {
  RunTorchRanks(3, [](int rank) {
    auto weight = OptionZeros(2);
    auto optimizer = WrapWith({{"weight", weight}}, Options().op(ReduceOp::Sum));
    Slope(weight, rank + 1).backward();
    optimizer.step();
    EXPECT_EQ(First(weight), -6);
  });
}

// Three ranks' gradients of 3e38 add up to infinity unless they are made smaller before.
TEST(OptimizerOptionsTest, PredivideKeepsLargeSumsFinite) {
  RunTorchRanks(3, [](int) {
    auto plain = OptionZeros(1);
    auto divided = OptionZeros(1);
    auto a = WrapWith({{"w", plain}});
    auto b = WrapWith({{"w", divided}}, Options().gradient_predivide_factor(3));
    Slope(plain, 3e38).backward();
    Slope(divided, 3e38).backward();
    a.step();
    b.step();
    EXPECT_TRUE(std::isinf(First(plain)));
    EXPECT_NEAR(First(divided) / -3e38, 1, 1e-5);
  });
}

TEST(OptimizerOptionsTest, BadOnesAreRefusedOnEveryRankWithTheRankThatHasThem) {
  const std::vector<std::pair<Options, std::string>> bad = {
      {Options().gradient_predivide_factor(0), "gradient_predivide_factor is 0"},
      {Options().gradient_predivide_factor(std::numeric_limits<double>::infinity()),
       "gradient_predivide_factor is inf"},
      {Options().gradient_predivide_factor(2).op(ReduceOp::Sum), "need op Average"},
      {Options().backward_passes_per_step(0), "backward_passes_per_step is 0; it has to be"},
      {Options().check_parameters_every(-1), "check_parameters_every is -1"},
      {Options()
           .hook([](const GradientBucket&) { return [] { return torch::Tensor(); }; })
           .compression(Compression::BF16),
       "a hook does not go with op"},
  };
  for (const auto& [options, words] : bad) {
    RunTorchRanks(2, [&, options = options, words = words](int rank) {
      auto weight = OptionZeros(1);
      const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] {
        WrapWith({{"w", weight}}, rank == 1 ? options : Options());
      });
      EXPECT_THAT(text, AllOf(HasSubstr(words), HasSubstr("rank 1")));
    });
    RunTorchRanks(1, [&, options = options, words = words](int) {
      auto weight = OptionZeros(1);
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                          [&] {
                            WrapWith({{"w", weight}}, options);
                          }),
                  HasSubstr(words));
    });
  }
}

TEST(OptimizerOptionsTest, OnesThatDifferAreNamedOnEveryRank) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(1);
    const auto text = ErrorOf(ErrorCode::Mismatch, [&] {
      WrapWith({{"w", weight}}, Options().backward_passes_per_step(1 + rank));
    });
    EXPECT_THAT(text, AllOf(HasSubstr("gradients by average, called \"gradient/\" on rank 0"),
                            HasSubstr("gradients by average, 2 backward passes, called")));
  });
}

TEST(OptimizerOptionsTest, NamesAndChecksThatDifferAreNamedOnEveryRank) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(1);
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          WrapWith({{"w", weight}}, Options().name(rank == 0 ? "a" : "b"));
                        }),
                AllOf(HasSubstr("gradient:a/"), HasSubstr("gradient:b/")));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          WrapWith({{"w", weight}}, Options().check_parameters_every(10 * rank));
                        }),
                HasSubstr("checked every 10 steps on rank 1"));
  });
}

TEST(OptimizerOptionsTest, CompressedGradientsAreThoseOfTheRoundedNumbers) {
  RunTorchRanks(3, [](int rank) {
    auto weight = OptionZeros(4);
    auto optimizer = WrapWith(
        {{"w", weight}},
        Options().compression(Compression::BF16).compression_scope(CompressionScope::Everywhere));
    const double slope = 1.0 + rank / 1000.0;
    Slope(weight, slope).backward();
    optimizer.synchronize();
    double sum = 0;
    for (int r = 0; r < 3; ++r) {
      sum += torch::tensor(1.0 + r / 1000.0, torch::kFloat).to(torch::kBFloat16).item<float>();
    }
    const auto expected = torch::tensor(sum / 3, torch::kFloat).to(torch::kBFloat16).item<float>();
    EXPECT_EQ(weight.grad()[0].item<float>(), expected);
    EXPECT_NE(expected, static_cast<float>(1.001)) << "and not those of the exact ones";
  });
}

TEST(OptimizerOptionsTest, OnOneHostCompressionIsLeftOutByDefault) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(1);
    auto optimizer = WrapWith({{"w", weight}}, Options().compression(Compression::F16));
    Slope(weight, 1.0001 + rank).backward();
    optimizer.synchronize();
    EXPECT_FLOAT_EQ(weight.grad()[0].item<float>(), 1.5001f);
  });
}

TEST(OptimizerOptionsTest, ParametersAreCheckedAtTheStartAndEveryFewSteps) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(3);
    auto optimizer = WrapWith({{"w", weight}}, Options().check_parameters_every(2));
    const auto step = [&] {
      optimizer.zero_grad();
      Slope(weight, 1).backward();
      optimizer.step();
    };
    const auto drift = [&](float by) {
      torch::NoGradGuard no_grad;
      if (rank == 1) weight[2] += by;
    };
    drift(1);
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, step),
                AllOf(HasSubstr("\"w\""), HasSubstr("rank 1"), HasSubstr("[2]")));
    drift(-1);
    optimizer.step();
    drift(1);
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, step), HasSubstr("\"w\""));
    optimizer.step();  // not due: it does not look
  });
}

// ---- a hook of the user's ----

TEST(HookTest, ReducesInstead) {
  RunTorchRanks(2, [](int rank) {
    auto a = torch::zeros({2, 3}, torch::requires_grad());
    auto b = OptionZeros(5);
    std::vector<std::string> seen;
    std::mutex mutex;
    const auto hook = [&](const GradientBucket& bucket) {
      EXPECT_EQ(bucket.parameters.size(), bucket.gradients.size());
      EXPECT_EQ(bucket.buffer.dim(), 1);
      for (std::size_t i = 0; i < bucket.gradients.size(); ++i) {
        const std::lock_guard lock(mutex);
        seen.push_back(bucket.parameters[i]);
        EXPECT_EQ(bucket.gradients[i].sizes(), bucket.parameters[i] == "a" ? a.sizes() : b.sizes());
      }
      auto handle =
          allreduce_async(bucket.buffer.to(torch::kHalf),
                          AllreduceOptions().name(bucket.name + "/f16").op(ReduceOp::Sum));
      return [handle] { return synchronize(handle).to(torch::kFloat); };
    };
    auto optimizer = WrapWith({{"a", a}, {"b", b}}, Options().hook(hook));
    for (int step = 1; step <= 2; ++step) {
      optimizer.zero_grad();
      (Slope(a, rank + 1) + Slope(b, 10)).backward();
      optimizer.step();
      EXPECT_EQ(First(a), -3 * step);
      EXPECT_EQ(First(b), -20 * step);
    }
    EXPECT_THAT(seen, testing::UnorderedElementsAre("a", "a", "b", "b"));
  });
}

TEST(HookTest, MayReduceInPlaceAndServesParametersThatSomeRanksDoNotUse) {
  RunTorchRanks(2, [](int rank) {
    auto used = OptionZeros(2);
    auto sometimes = OptionZeros(2);
    auto never = OptionZeros(2);
    const auto hook = [](const GradientBucket& bucket) {
      auto handle = allreduce_async_(bucket.buffer, AllreduceOptions().name(bucket.name));
      return [handle] { return synchronize(handle); };
    };
    const auto named = [&hook](const GradientBucket& bucket) {
      GradientBucket renamed = bucket;
      renamed.name += "/sum";
      return hook(renamed);
    };
    auto optimizer = WrapWith({{"used", used}, {"sometimes", sometimes}, {"never", never}},
                              Options().hook(named));
    auto loss = Slope(used, rank + 1);
    if (rank == 0) loss = loss + Slope(sometimes, 4);
    loss.backward();
    optimizer.step();
    EXPECT_EQ(First(used), -1.5f);
    EXPECT_EQ(First(sometimes), -2);
    EXPECT_FALSE(never.grad().defined());
  });
}

// The others may have begun what the one that fails has not: the job cannot go on.
TEST(HookTest, OneThatFailsOnOneRankEndsTheJob) {
  for (const bool later : {false, true}) {
    RunTorchRanks(2, [later](int rank) {
      auto weight = OptionZeros(1);
      const auto hook = [&](const GradientBucket& bucket) -> std::function<at::Tensor()> {
        if (rank == 1 && !later) throw std::runtime_error("no room for the residual");
        auto handle =
            allreduce_async_(bucket.buffer, AllreduceOptions().name(bucket.name + "/sum"));
        return [handle, fails = rank == 1] {
          if (fails) throw std::string("no room for the residual");
          return synchronize(handle);
        };
      };
      const auto text = ErrorOf(ErrorCode::Aborted, [&] {
        // The other may fail before this one is made.
        auto optimizer = WrapWith({{"w", weight}}, Options().hook(hook));
        Slope(weight, 1).backward();
        optimizer.step();
        for (;;) allreduce(torch::ones({1}));  // the other's failure arrives
      });
      EXPECT_THAT(text, AllOf(HasSubstr("communication hook failed"), HasSubstr("\"w\""),
                              HasSubstr(later ? "unknown type" : "no room")));
    });
  }
}

TEST(HookTest, AResultThatDoesNotFitIsNamed) {
  RunTorchRanks(2, [](int) {
    auto weight = OptionZeros(2);
    const auto hook = [](const GradientBucket& bucket) {
      return [buffer = bucket.buffer] { return buffer.to(torch::kHalf); };
    };
    auto optimizer = WrapWith({{"w", weight}}, Options().hook(hook));
    EXPECT_THAT(ErrorOf(ErrorCode::Aborted,
                        [&] {
                          Slope(weight, 1).backward();
                          optimizer.step();
                        }),
                AllOf(HasSubstr("\"w\""), HasSubstr("it gave float16 [2] for float32 [2]")));
  });
}

// Counts that it was called.
struct CountingHook : torch::autograd::FunctionPostHook {
  explicit CountingHook(std::atomic<int>& calls) : calls_(calls) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& /*inputs*/) override {
    ++calls_;
    return outputs;
  }
  std::atomic<int>& calls_;
};

// Another thread destroys it, so that the hook that runs has the last reference to what it belongs to.
// `in_bucket`: in backward() itself; otherwise there is no bucket yet, and it is called at its end.
void DestroyInHook(int rank, bool in_bucket) {
  auto weight = OptionZeros(2);
  std::atomic<int> calls{0};
  std::optional<DistributedOptimizer<SGD>> optimizer;
  bool destroys = false;
  const auto hook = [&optimizer, &destroys](const GradientBucket& bucket) {
    if (destroys) std::thread([&optimizer] { optimizer.reset(); }).join();
    return [buffer = bucket.buffer] { return buffer; };
  };
  optimizer.emplace(WrapWith({{"w", weight}}, Options().hook(hook)));
  if (in_bucket) {
    Slope(weight, 1).backward();
    optimizer->zero_grad();
  }
  destroys = true;
  const auto node = torch::autograd::impl::grad_accumulator(weight);
  node->add_post_hook(std::make_unique<CountingHook>(calls));
  Slope(weight, rank + 1).backward();
  EXPECT_FALSE(optimizer.has_value());
  EXPECT_EQ(calls, 1) << "autograd has lost its place among the hooks";
  EXPECT_EQ(First(weight.grad()), static_cast<float>(rank + 1));
  auto next = WrapWith({{"w", weight}});
  next.zero_grad();
  Slope(weight, rank + 1).backward();
  next.step();
  EXPECT_EQ(First(weight), -1.5f);
  EXPECT_EQ(calls, 2);
}

TEST(HookTest, RunsToItsEndThoughItsOptimizerIsDestroyedMeanwhile) {
  for (const bool in_bucket : {false, true}) {
    RunTorchRanks(2, [in_bucket](int rank) { DestroyInHook(rank, in_bucket); });
  }
}

// ---- accumulation ----

TEST(AccumulateTest, ReducesWithTheLastPass) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(1);
    auto optimizer = WrapWith({{"w", weight}}, Options().backward_passes_per_step(2));
    for (int step = 1; step <= 3; ++step) {
      optimizer.zero_grad();
      Slope(weight, rank + 1).backward();
      EXPECT_EQ(weight.grad().item<float>(), static_cast<float>(rank + 1)) << "still its own";
      Slope(weight, 10).backward();
      optimizer.step();
      EXPECT_EQ(First(weight), -11.5f * static_cast<float>(step));
    }
  });
}

TEST(AccumulateTest, AnEarlyStepReducesWhatIsThere) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(1);
    auto optimizer = WrapWith({{"w", weight}}, Options().backward_passes_per_step(4));
    Slope(weight, rank + 1).backward();
    optimizer.step();
    EXPECT_EQ(First(weight), -1.5f);
  });
}

TEST(AccumulateTest, OnePassTooManyNamesTheCure) {
  RunTorchRanks(2, [](int) {
    auto weight = OptionZeros(1);
    auto optimizer =
        WrapWith({{"w", weight}}, Options().backward_passes_per_step(2).average_at(Average::Step));
    Slope(weight, 1).backward();
    Slope(weight, 1).backward();
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { Slope(weight, 1).backward(); }),
                AllOf(HasSubstr("invalid argument: "), HasSubstr("\"w\""),
                      HasSubstr("backward_passes_per_step"), HasSubstr("no_sync()")));
    optimizer.step();
    EXPECT_EQ(First(weight), -2);
  });
}

TEST(AccumulateTest, ZeroGradStartsAnew) {
  RunTorchRanks(2, [](int) {
    auto weight = OptionZeros(1);
    auto optimizer = WrapWith({{"w", weight}}, Options().backward_passes_per_step(2));
    Slope(weight, 100).backward();
    optimizer.zero_grad();
    Slope(weight, 1).backward();
    Slope(weight, 1).backward();
    optimizer.step();
    EXPECT_EQ(First(weight), -2);
  });
}

TEST(AccumulateTest, NoSyncScopesNestAndEndInAnyOrder) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(1);
    auto optimizer = WrapWith({{"w", weight}});
    std::optional<detail::Scope> outer(optimizer.no_sync());
    std::optional<detail::Scope> inner(optimizer.no_sync());
    Slope(weight, rank).backward();
    outer.reset();
    Slope(weight, rank).backward();
    inner.reset();
    Slope(weight, rank).backward();
    optimizer.step();
    EXPECT_EQ(First(weight), -1.5f);
  });
}

TEST(AccumulateTest, WhatOnlyHeldPassesHaveTouchedIsReducedByStep) {
  RunTorchRanks(2, [](int rank) {
    auto first = OptionZeros(1);
    auto second = OptionZeros(1);
    auto optimizer = WrapWith({{"first", first}, {"second", second}});
    {
      const auto hold = optimizer.no_sync();
      (Slope(first, rank) + Slope(second, 2 * rank)).backward();
    }
    Slope(second, 1).backward();
    optimizer.step();
    EXPECT_EQ(First(first), -0.5f);
    EXPECT_EQ(First(second), -2);
  });
}

// Two threads run backward() through the same parameters at once.
TEST(AccumulateTest, BackwardOnTwoThreads) {
  RunTorchRanks(2, [](int rank) {
    std::vector<torch::Tensor> weights;
    NamedTensors names;
    for (int i = 0; i < 20; ++i) {
      weights.push_back(OptionZeros(100));
      names.emplace_back("w" + std::to_string(i), weights.back());
    }
    auto optimizer =
        WrapWith(names, Options().backward_passes_per_step(2).average_at(Average::Step));
    for (int step = 1; step <= 20; ++step) {
      optimizer.zero_grad();
      const auto backward = [&](double slope) {
        torch::Tensor loss = Slope(weights[0], slope);
        for (std::size_t i = 1; i < weights.size(); ++i) loss = loss + Slope(weights[i], slope);
        loss.backward();
      };
      std::thread other([&] { backward(rank + 1); });
      backward(10);
      other.join();
      optimizer.step();
      for (const auto& weight : weights) {
        EXPECT_TRUE(torch::equal(weight.detach(), torch::full({100}, -11.5f * step)));
      }
    }
  });
}

// ---- synchronize, skip_synchronize, clipping ----

TEST(SkipSynchronizeTest, StepsWithTheGradientsAsTheyAre) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(1);
    auto optimizer = WrapWith({{"w", weight}});
    Slope(weight, rank + 1).backward();
    optimizer.synchronize();
    {
      const auto skip = optimizer.skip_synchronize();
      optimizer.step();
    }
    EXPECT_EQ(First(weight), -1.5f);
    optimizer.zero_grad();
    {
      const auto hold = optimizer.no_sync();
      Slope(weight, rank + 1).backward();
    }
    {
      const auto skip = optimizer.skip_synchronize();
      optimizer.step();
    }
    EXPECT_EQ(First(weight), -1.5f - static_cast<float>(rank + 1)) << "each rank for itself";
  });
}

TEST(SkipSynchronizeTest, AClosureIsAnErrorThere) {
  RunTorchRanks(2, [](int) {
    auto weight = OptionZeros(1);
    auto optimizer = WrapWith({{"w", weight}});
    const auto skip = optimizer.skip_synchronize();
    EXPECT_THAT(
        ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step([&] { return weight.sum(); }); }),
        AllOf(HasSubstr("closure"), HasSubstr("skip_synchronize()")));
  });
}

TEST(ClosureTest, GradientsUnderWayBeforeItAreAnError) {
  RunTorchRanks(2, [](int) {
    auto weight = OptionZeros(1);
    auto optimizer = WrapWith({{"w", weight}}, Options().average_at(Average::Step));
    auto loss = Slope(weight, 1);
    loss.backward();
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step([&] { return loss; }); }),
                AllOf(HasSubstr("\"w\""), HasSubstr("call step() without one")));
    optimizer.step();
    EXPECT_EQ(First(weight), -1);
  });
}

TEST(ClosureTest, OneThatReturnsNothingOnOneRankIsToldToAll) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(1);
    auto optimizer = WrapWith({{"w", weight}});
    EXPECT_THAT(
        ErrorOf(ErrorCode::InvalidArgument,
                [&] {
                  optimizer.step([&] {
                    auto loss = Slope(weight, 1);
                    loss.backward();
                    return rank == 1 ? torch::Tensor() : loss;
                  });
                }),
        AllOf(HasSubstr("loss of the closure"), HasSubstr("undefined"), HasSubstr("rank 1")));
  });
}

TEST(SkipSynchronizeTest, GradientsUnderWayAreAnError) {
  RunTorchRanks(2, [](int) {
    auto weight = OptionZeros(1);
    auto optimizer = WrapWith({{"w", weight}}, Options().average_at(Average::Step));
    Slope(weight, 1).backward();
    {
      const auto skip = optimizer.skip_synchronize();
      EXPECT_THAT(
          ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
          AllOf(HasSubstr("skip_synchronize()"), HasSubstr("\"w\""), HasSubstr("synchronize()")));
    }
    optimizer.step();
  });
}

TEST(ClipTest, IsLibTorchsOfTheAverage) {
  for (const double norm_type : {2.0, 1.0, 3.0, std::numeric_limits<double>::infinity()}) {
    const Batch joined = JoinedBatch(0, 2);
    SmallNet alone;
    Loss(alone, joined).backward();
    const double expected_norm =
        torch::nn::utils::clip_grad_norm_(alone.parameters(), 0.1, norm_type);
    RunTorchRanks(2, [&](int rank) {
      SmallNet net;
      DistributedOptimizer<SGD> optimizer(SGD(net.parameters(), SGDOptions(1.0)),
                                          net.named_parameters());
      Loss(net, BatchOfRank(0, rank)).backward();
      EXPECT_NEAR(clip_grad_norm_(optimizer, 0.1, norm_type), expected_norm, 1e-12);
      for (std::size_t i = 0; i < net.parameters().size(); ++i) {
        EXPECT_LT(
            (net.parameters()[i].grad() - alone.parameters()[i].grad()).abs().max().item<double>(),
            1e-12);
      }
    });
  }
}

TEST(ClipTest, GradientsBelowTheNormStay) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(1);
    auto optimizer = WrapWith({{"w", weight}});
    Slope(weight, rank).backward();
    EXPECT_NEAR(clip_grad_norm_(optimizer, 0.6), 0.5, 1e-9);
    EXPECT_EQ(weight.grad().item<float>(), 0.5f);
    SGD plain({weight}, SGDOptions(1.0));
    EXPECT_NEAR(clip_grad_norm_(plain, 0.25), 0.5, 1e-9);
    EXPECT_NEAR(weight.grad().item<float>(), 0.25f, 1e-6);
  });
}

// LibTorch finds no largest element there, and throws.
TEST(ClipTest, GradientsWithoutElementsChangeNoNorm) {
  RunTorchRanks(2, [](int rank) {
    for (const Shard shard : {Shard::None, Shard::Gradients}) {
      auto weight = OptionZeros(1);
      auto empty = torch::zeros({0, 3}).requires_grad_();
      auto optimizer =
          WrapWith({{"w", weight}, {"empty", empty}}, DistributedOptimizerOptions().shard(shard));
      EXPECT_EQ(clip_grad_norm_(optimizer, 1), 0) << "there is no gradient";
      (empty.sum() + Slope(weight, rank)).backward();
      EXPECT_NEAR(clip_grad_norm_(optimizer, 0.25, INFINITY), 0.5, 1e-9);
      optimizer.zero_grad();
      empty.sum().backward();
      EXPECT_EQ(clip_grad_norm_(optimizer, 1, INFINITY), 0);
      optimizer.step();
    }
  });
}

TEST(ClipTest, BadArgumentsAndNormsAreNamed) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(1);
    auto optimizer = WrapWith({{"w", weight}});
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { clip_grad_norm_(optimizer, -1); }),
                HasSubstr("max_norm is -1"));
    Slope(weight, rank == 0 ? std::numeric_limits<double>::infinity() : 1).backward();
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] { clip_grad_norm_(optimizer, 1, 2, /*error_if_nonfinite=*/true); }),
                HasSubstr("not finite"));
  });
}

// ---- several optimizers ----

TEST(SeveralTest, OfTheSameParameters) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(1);
    auto first = WrapWith({{"w", weight}});
    auto second = WrapWith({{"w", weight}});
    for (int step = 1; step <= 3; ++step) {
      first.zero_grad();
      Slope(weight, rank + 1).backward();
      first.step();
      second.step();
      EXPECT_EQ(First(weight), -3 * step);
    }
  });
}

// What comes between two steps may reach a parameter on some ranks only.
TEST(SeveralTest, OfTheSameParametersWithGraphsThatDiffer) {
  RunTorchRanks(2, [](int rank) {
    auto a = OptionZeros(1);
    auto b = OptionZeros(1);
    auto first = WrapWith({{"a", a}, {"b", b}});
    auto second = WrapWith({{"a", a}, {"b", b}});
    (Slope(a, 1) + Slope(b, 1)).backward();
    first.step();
    (rank == 0 ? Slope(a, 1) + Slope(b, 4) : Slope(a, 1)).backward();
    second.step();
    EXPECT_EQ(First(a), -1 - 2);
    EXPECT_EQ(First(b), -1 - 3);
  });
}

TEST(SeveralTest, OfTheSameParametersMayBeDestroyedInAnyOrder) {
  for (const bool first_goes : {true, false}) {
    RunTorchRanks(2, [first_goes](int rank) {
      auto weight = OptionZeros(1);
      auto first = std::make_unique<DistributedOptimizer<SGD>>(WrapWith({{"w", weight}}));
      auto second = std::make_unique<DistributedOptimizer<SGD>>(WrapWith({{"w", weight}}));
      (first_goes ? first : second).reset();
      auto& left = first_goes ? *second : *first;
      Slope(weight, rank + 1).backward();
      left.step();
      EXPECT_EQ(First(weight), -1.5f);
      (first_goes ? second : first).reset();
      weight.mutable_grad().reset();
      Slope(weight, rank + 1).backward();
      EXPECT_EQ(First(weight.grad()), static_cast<float>(rank + 1));
    });
  }
}

TEST(SeveralTest, OfTheSameParametersNeedTheSameOptions) {
  RunTorchRanks(2, [](int) {
    auto weight = OptionZeros(1);
    auto first = WrapWith({{"w", weight}});
    EXPECT_THAT(
        ErrorOf(ErrorCode::InvalidArgument,
                [&] {
                  WrapWith({{"w", weight}}, Options().op(ReduceOp::Sum));
                }),
        AllOf(HasSubstr("\"w\""), HasSubstr("average; here sum"), HasSubstr("the same options")));
  });
}

TEST(SeveralTest, WhatIsSharedOnOneRankOnlyIsNamed) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(1);
    auto other = OptionZeros(1);
    auto first = WrapWith({{"w", rank == 0 ? weight : other}});
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          WrapWith({{"w", weight}});
                        }),
                AllOf(HasSubstr("as gradient/w on rank 0"), HasSubstr("rank 1")));
  });
}

TEST(SeveralTest, NamesTellThemApart) {
  RunTorchRanks(2, [](int rank) {
    auto a = OptionZeros(1);
    auto b = OptionZeros(1);
    auto critic = WrapWith({{"w", a}}, Options().name("critic"));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          WrapWith({{"w", b}}, Options().name("critic"));
                        }),
                AllOf(HasSubstr("gradient:critic/w"), HasSubstr("different names")));
    auto actor = WrapWith({{"w", b}}, Options().name("actor"));
    (Slope(a, rank) + Slope(b, 10 * rank)).backward();
    actor.step();
    critic.step();
    EXPECT_EQ(First(a), -0.5f);
    EXPECT_EQ(First(b), -5);
  });
}

// What the generator's loss does to the discriminator's gradients is of no use in a GAN.
TEST(SeveralTest, NoSyncKeepsTheOtherOptimizerOutOfABackward) {
  RunTorchRanks(2, [](int rank) {
    auto generator = torch::ones({1}, torch::requires_grad());
    auto discriminator = torch::ones({1}, torch::requires_grad());
    auto g = WrapWith({{"g", generator}});
    auto d = WrapWith({{"d", discriminator}});
    for (int step = 0; step < 2; ++step) {
      d.zero_grad();
      (discriminator * generator.detach()).sum().mul(0.25 * rank).backward();
      d.step();
      g.zero_grad();
      {
        const auto hold = d.no_sync();
        (discriminator * generator).sum().mul(0.1 * rank).backward();
      }
      g.step();
    }
    // 1 - 0.125 * 1 = 0.875; g = 1 - 0.05 * 0.875, and so on.
    const double d1 = 1 - 0.125;
    const double g1 = 1 - 0.05 * d1;
    const double d2 = d1 - 0.125 * g1;
    EXPECT_NEAR(First(discriminator), d2, 1e-6);
    EXPECT_NEAR(First(generator), g1 - 0.05 * d2, 1e-6);
  });
}

TEST(SeveralTest, WithoutNoSyncZeroGradSaysWhatToDo) {
  RunTorchRanks(2, [](int) {
    auto weight = OptionZeros(1);
    auto optimizer = WrapWith({{"w", weight}}, Options().average_at(Average::Step));
    Slope(weight, 1).backward();
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.zero_grad(); }),
                AllOf(HasSubstr("invalid argument: "), HasSubstr("no_sync()")));
    optimizer.step();
  });
}

// ---- parameters that come and go ----

TEST(LaterTest, ParametersAddedThroughTheBase) {
  RunTorchRanks(2, [](int rank) {
    auto first = OptionZeros(1);
    auto named = OptionZeros(1);
    auto unnamed = OptionZeros(1);
    DistributedOptimizer<SGD> optimizer(SGD({first}, SGDOptions(1.0)),
                                        NamedTensors{{"first", first}, {"named", named}});
    Slope(first, rank).backward();
    optimizer.step();
    optimizer.add_param_group(torch::optim::OptimizerParamGroup({named}));
    optimizer.param_groups()[0].params().push_back(unnamed);
    optimizer.zero_grad();
    (Slope(first, rank) + Slope(named, 2 * rank) + Slope(unnamed, 4 * rank)).backward();
    optimizer.step();
    EXPECT_EQ(First(first), -1);
    EXPECT_EQ(First(named), -1);
    EXPECT_EQ(First(unnamed), -2);
  });
}

// Nobody has seen it before its first backward(), the end of which averages the others.
TEST(LaterTest, AParameterAddedBehindZeroGradIsAveraged) {
  const auto train = [](const Options& options, bool by_synchronize, double expected) {
    RunTorchRanks(2, [&](int rank) {
      auto first = OptionZeros(2);
      auto added = OptionZeros(2);
      auto optimizer = WrapWith({{"first", first}}, options);
      optimizer.zero_grad();
      optimizer.add_param_group(torch::optim::OptimizerParamGroup({added}));
      Slope(torch::cat({first, added}), rank + 1).backward();
      if (by_synchronize) optimizer.synchronize();
      if (expected == 0) {
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                    HasSubstr("the parameter was added"));
        return;
      }
      optimizer.step();
      EXPECT_EQ(First(first), expected);
      EXPECT_EQ(First(added), expected);
    });
  };
  for (const Average average : {Average::Backward, Average::Step}) {
    for (const bool by_synchronize : {false, true}) {
      const Options options = Options().average_at(average);
      train(options, by_synchronize, -1.5);
      // What is averaged once in a step only: the others may have been clipped since.
      const bool refused = average == Average::Backward && !by_synchronize;
      train(Options(options).compression(Compression::BF16), by_synchronize, refused ? 0 : -1.5);
      train(Options(options).op(ReduceOp::Sum), by_synchronize, refused ? 0 : -3);
    }
  }
}

// The average is made up for the new one alone: a second average of the others, with a factor, would
// have other last bits.
TEST(LaterTest, AParameterAddedBehindZeroGradLeavesTheOtherAveragesAsTheyAre) {
  const auto train = [](const Options& options, bool behind, bool by_synchronize) {
    std::vector<torch::Tensor> trained(2);
    RunTorchRanks(2, [&](int rank) {
      auto first = OptionZeros(100);
      auto second = OptionZeros(100);
      auto added = OptionZeros(100);
      auto optimizer = WrapWith({{"first", first}, {"second", second}}, options);
      for (int step = 0; step < 5; ++step) {
        const auto add = [&](bool now) {
          if (step != 2 || !now) return;
          optimizer.add_param_group(torch::optim::OptimizerParamGroup({added}));
        };
        add(!behind);
        optimizer.zero_grad();
        add(behind);
        const auto all = torch::cat({first, second, step < 2 ? added.detach() : added});
        (all * (torch::arange(300) * 0.37 + rank * 0.7 + step * 0.3).sin()).sum().backward();
        if (by_synchronize) optimizer.synchronize();
        optimizer.step();
      }
      trained[static_cast<std::size_t>(rank)] = torch::cat({first, second, added}).detach();
    });
    EXPECT_TRUE(torch::equal(trained[0], trained[1]));
    return trained[0];
  };
  for (const Average average : {Average::Backward, Average::Step}) {
    const Options options = Options().average_at(average).gradient_predivide_factor(3);
    const torch::Tensor expected = train(options, /*behind=*/false, /*by_synchronize=*/false);
    EXPECT_TRUE(torch::equal(train(options, /*behind=*/true, /*by_synchronize=*/true), expected));
    const torch::Tensor by_step = train(options, /*behind=*/true, /*by_synchronize=*/false);
    if (average == Average::Step) {
      EXPECT_TRUE(torch::equal(by_step, expected));
    } else {
      EXPECT_TRUE(torch::allclose(by_step, expected)) << "the others were averaged again";
    }
  }
}

// Each rank's norm is another, which a gradient of its own is part of.
TEST(LaterTest, RanksStayAlikeWhereAProgramClipsAnAddedParametersGradient) {
  std::vector<torch::Tensor> trained(2);
  RunTorchRanks(2, [&trained](int rank) {
    auto first = OptionZeros(2);
    auto added = OptionZeros(2);
    auto optimizer = WrapWith({{"first", first}});
    optimizer.zero_grad();
    optimizer.add_param_group(torch::optim::OptimizerParamGroup({added}));
    Slope(torch::cat({first, added}), rank + 1).backward();
    torch::nn::utils::clip_grad_norm_(std::vector<torch::Tensor>{first, added}, 1.0);
    optimizer.step();
    trained[static_cast<std::size_t>(rank)] = torch::cat({first, added}).detach();
  });
  EXPECT_TRUE(torch::equal(trained[0], trained[1])) << trained[0] << trained[1];
}

// Nothing else has told the optimizer of the backward().
TEST(LaterTest, AParameterUnfrozenOrConvertedBehindZeroGradIsAveragedWhereOthersAre) {
  for (const bool converts : {false, true}) {
    RunTorchRanks(2, [converts](int rank) {
      auto weight = OptionZeros(2);
      weight.set_requires_grad(converts);
      auto optimizer = WrapWith({{"weight", weight}});
      for (const auto type : {torch::kDouble, torch::kFloat}) {
        optimizer.zero_grad();
        if (converts) weight.set_data(torch::zeros({2}, type));
        weight.set_requires_grad(true);
        Slope(weight, rank + 1).backward();
        EXPECT_EQ(First(weight.grad().to(torch::kFloat)), 1.5F);
        torch::nn::utils::clip_grad_norm_(std::vector<torch::Tensor>{weight}, 1.0);
        const float before = First(weight.to(torch::kFloat));
        optimizer.step();
        EXPECT_NEAR(First(weight.to(torch::kFloat)) - before, -std::sqrt(0.5), 1e-5);
      }
    });
  }
}

// Every rank says a word about it from then on, also one whose backward() has not reached it then.
TEST(LaterTest, AParameterMayBeUnfrozenForOneStep) {
  for (const Average average : {Average::Backward, Average::Step}) {
    for (const int ranks_that_reach_it : {1, 2}) {
      RunTorchRanks(2, [average, ranks_that_reach_it](int rank) {
        auto weight = OptionZeros(2);
        auto frozen = OptionZeros(2);
        frozen.set_requires_grad(false);
        auto optimizer =
            WrapWith({{"weight", weight}, {"frozen", frozen}}, Options().average_at(average));
        for (int step = 0; step < 4; ++step) {
          optimizer.zero_grad();
          frozen.set_requires_grad(step == 0);
          auto loss = Slope(weight, rank + 1);
          if (rank < ranks_that_reach_it) loss = loss + Slope(frozen, 2);
          loss.backward();
          optimizer.step();
        }
        EXPECT_EQ(First(weight), -6);
        EXPECT_EQ(First(frozen), -static_cast<float>(ranks_that_reach_it));
      });
    }
  }
}

// A program's first hook takes those out that are there.
TEST(LaterTest, AHookOfTheProgramsHidesNoGradient) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(2);
    auto optimizer = WrapWith({{"weight", weight}});
    weight.register_hook([](const torch::Tensor& gradient) { return gradient * 2; });
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      weight.set_data(torch::zeros({2}, step == 0 ? torch::kDouble : torch::kFloat));
      Slope(weight, rank + 1).backward();
      EXPECT_EQ(First(weight.grad().to(torch::kFloat)), 3);
      optimizer.step();
    }
  });
}

// The cure that the refusal names works after it, too.
TEST(LaterTest, ALateGradientIsAveragedBySynchronizeAfterItsRefusal) {
  RunTorchRanks(2, [](int rank) {
    auto first = OptionZeros(2);
    auto added = OptionZeros(2);
    auto optimizer = WrapWith({{"first", first}}, Options().op(ReduceOp::Sum));
    optimizer.zero_grad();
    optimizer.add_param_group(torch::optim::OptimizerParamGroup({added}));
    Slope(torch::cat({first, added}), rank + 1).backward();
    for (int again = 0; again < 2; ++again) {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                  HasSubstr("the parameter was added"));
    }
    optimizer.synchronize();
    optimizer.step();
    EXPECT_EQ(First(first), -3);
    EXPECT_EQ(First(added), -3);
  });
}

TEST(LaterTest, AGradientThatNoBackwardHasAveragedIsNotTakenFromAStep) {
  for (const bool by_synchronize : {false, true}) {
    RunTorchRanks(2, [by_synchronize](int rank) {
      auto first = OptionZeros(2);
      auto added = OptionZeros(2);
      auto optimizer = WrapWith({{"first", first}});
      optimizer.zero_grad();
      optimizer.add_param_group(torch::optim::OptimizerParamGroup({added}));
      Slope(added, rank + 1).backward();
      if (by_synchronize) optimizer.synchronize();
      torch::nn::utils::clip_grad_norm_(std::vector<torch::Tensor>{added}, 1.0);
      if (!by_synchronize) {
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                    AllOf(HasSubstr("added"), HasSubstr("synchronize() of the optimizer")));
        EXPECT_EQ(First(added), 0);
        optimizer.zero_grad();
        Slope(added, rank + 1).backward();
        torch::nn::utils::clip_grad_norm_(std::vector<torch::Tensor>{added}, 1.0);
      }
      optimizer.step();
      EXPECT_NEAR(First(added), -std::sqrt(0.5), 1e-5);
    });
  }
}

TEST(LaterTest, AParameterThatIsUnfrozenAfterTheAverageIsAveraged) {
  RunTorchRanks(2, [](int rank) {
    auto first = OptionZeros(2);
    auto frozen = OptionZeros(2);
    frozen.set_requires_grad(false);
    auto optimizer = WrapWith({{"first", first}, {"frozen", frozen}});
    optimizer.zero_grad();
    Slope(first, rank + 1).backward();
    frozen.set_requires_grad(true);
    Slope(frozen, rank + 1).backward();
    optimizer.step();
    EXPECT_EQ(First(first), -1.5F);
    EXPECT_EQ(First(frozen), -1.5F);
  });
}

// Also one that the program has changed in place, and kept into the next step.
TEST(LaterTest, ASumIsNotAddedTo) {
  RunTorchRanks(2, [](int rank) {
    auto weight = OptionZeros(2);
    auto optimizer = WrapWith({{"weight", weight}}, Options().op(ReduceOp::Sum));
    optimizer.zero_grad();
    Slope(weight, rank + 1).backward();
    weight.mutable_grad().mul_(0.5);
    optimizer.step();
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { Slope(weight, rank + 1).backward(); }),
                HasSubstr("holds an average"));
    optimizer.zero_grad();
    Slope(weight, rank + 1).backward();
    optimizer.step();
    weight.mutable_grad().zero_();
    Slope(weight, rank + 1).backward();
    optimizer.step();
    EXPECT_EQ(First(weight), -1.5F - 3 - 3);
  });
}

TEST(LaterTest, AnAddedParameterMayBeReplaced) {
  RunTorchRanks(2, [](int rank) {
    auto first = OptionZeros(1);
    DistributedOptimizer<SGD> optimizer(SGD({first}, SGDOptions(1.0)),
                                        NamedTensors{{"first", first}});
    for (int i = 0; i < 3; ++i) {
      auto later = OptionZeros(2 + i);
      optimizer.param_groups()[0].params().resize(1);
      optimizer.param_groups()[0].params().insert(optimizer.param_groups()[0].params().begin(),
                                                  later);
      optimizer.zero_grad();
      (Slope(first, rank) + Slope(later, rank)).backward();
      optimizer.step();
      EXPECT_EQ(First(later), -0.5f);
      optimizer.param_groups()[0].params() = {first};
    }
  });
}

TEST(LaterTest, ParametersAddedDifferentlyAreNamed) {
  RunTorchRanks(2, [](int rank) {
    auto first = OptionZeros(1);
    auto later = OptionZeros(2 + rank);
    DistributedOptimizer<SGD> optimizer(SGD({first}, SGDOptions(1.0)),
                                        NamedTensors{{"first", first}});
    optimizer.param_groups()[0].params().push_back(later);
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { optimizer.zero_grad(); }),
                AllOf(HasSubstr("\"added parameter 1\" float32 [2] on rank 0"),
                      HasSubstr("float32 [3] on rank 1")));
  });
}

TEST(LaterTest, ParametersTakenAwayAreNoLongerReduced) {
  RunTorchRanks(2, [](int rank) {
    auto a = OptionZeros(1);
    auto b = OptionZeros(1);
    auto optimizer = WrapWith({{"a", a}, {"b", b}});
    optimizer.param_groups()[0].params().pop_back();
    optimizer.zero_grad();
    (Slope(a, rank) + Slope(b, rank)).backward();
    optimizer.step();
    EXPECT_EQ(First(a), -0.5f);
    EXPECT_EQ(b.grad().item<float>(), static_cast<float>(rank));
  });
}

// What is frozen on some ranks only still counts there, as zero: nobody waits for it in vain.
TEST(LaterTest, FrozenOnOneRankOnlyCountsAsZeroThere) {
  RunTorchRanks(2, [](int rank) {
    auto a = OptionZeros(1);
    auto b = OptionZeros(1);
    auto optimizer = WrapWith({{"a", a}, {"b", b}});
    if (rank == 1) b.requires_grad_(false);
    (Slope(a, 2) + Slope(b, 2)).backward();
    optimizer.step();
    EXPECT_EQ(First(a), -2);
    EXPECT_EQ(First(b), -1);
  });
}

// ---- gradients of gradients ----

TEST(GraphTest, GradientsWithAGraphAreAveragedInACopy) {
  RunTorchRanks(2, [](int rank) {
    auto weight = torch::full({1}, 2.0f, torch::requires_grad());
    auto optimizer = WrapWith({{"w", weight}}, Options().average_at(Average::Step));
    ((rank + 1) * weight * weight * weight).sum().backward({}, c10::nullopt, /*create_graph=*/true);
    const auto own = weight.grad();
    optimizer.step();
    EXPECT_EQ(own.item<float>(), 12.0f * static_cast<float>(rank + 1)) << "it stays as it was";
    EXPECT_EQ(weight.grad().item<float>(), 18.0f);
    EXPECT_EQ(First(weight), 2.0f - 18.0f);
  });
}

// A gradient penalty by autograd::grad, whose graph the backward() then goes through.
TEST(GraphTest, PenaltyOfTheGradientFollowsOneProcess) {
  const auto loss_of = [](SmallNet& net, const Batch& batch) {
    const auto x = batch.x.clone().requires_grad_();
    const auto output = net.forward(x);
    const auto slopes = torch::autograd::grad({output.sum()}, {x}, {}, c10::nullopt,
                                              /*create_graph=*/true)[0];
    return torch::mse_loss(output, batch.y) + 0.1 * slopes.pow(2).mean();
  };
  SmallNet alone;
  SGD reference(alone.parameters(), SGDOptions(0.1));
  for (int step = 0; step < 5; ++step) {
    reference.zero_grad();
    loss_of(alone, JoinedBatch(step, 2)).backward();
    reference.step();
  }
  RunTorchRanks(2, [&](int rank) {
    SmallNet net;
    DistributedOptimizer<SGD> optimizer(SGD(net.parameters(), SGDOptions(0.1)),
                                        net.named_parameters());
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      loss_of(net, BatchOfRank(step, rank)).backward();
      optimizer.step();
    }
    EXPECT_LT(Distance(net.parameters(), alone.parameters()), 1e-12);
  });
}

// ---- other bases and schedulers ----

// SignSGD: what a user might write.
struct SignDescent : SGD {
  using SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override {
    torch::Tensor loss;
    if (closure) loss = closure();
    torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (auto& parameter : group.params()) {
        if (parameter.grad().defined()) parameter.add_(parameter.grad().sign(), -1);
      }
    }
    return loss;
  }
};

TEST(BaseTest, AUsersOwnOptimizer) {
  RunTorchRanks(3, [](int rank) {
    auto weight = OptionZeros(1);
    DistributedOptimizer<SignDescent> optimizer(SignDescent({weight}, SGDOptions(1.0)),
                                                NamedTensors{{"w", weight}});
    // Two ranks would go one way, the average goes the other.
    Slope(weight, rank == 0 ? 10 : -1).backward();
    optimizer.step();
    EXPECT_EQ(First(weight), -1);
  });
}

TEST(BaseTest, ASchedulerMadeAfterWrappingSetsTheRate) {
  RunTorchRanks(2, [](int) {
    auto weight = OptionZeros(1);
    auto optimizer = WrapWith({{"w", weight}});
    torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.5);
    Slope(weight, 1).backward();
    optimizer.step();
    for (int i = 0; i < 2; ++i) scheduler.step();
    optimizer.zero_grad();
    Slope(weight, 1).backward();
    optimizer.step();
    EXPECT_EQ(First(weight), -1.5f);
  });
}

TEST(BaseTest, ParameterGroupsKeepTheirOptions) {
  RunTorchRanks(2, [](int rank) {
    auto slow = OptionZeros(1);
    auto fast = OptionZeros(1);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<torch::Tensor>{slow}, std::make_unique<SGDOptions>(0.5));
    groups.emplace_back(std::vector<torch::Tensor>{fast}, std::make_unique<SGDOptions>(2.0));
    DistributedOptimizer<SGD> optimizer(SGD(groups, SGDOptions(1.0)),
                                        NamedTensors{{"slow", slow}, {"fast", fast}});
    (Slope(slow, rank) + Slope(fast, rank)).backward();
    optimizer.step();
    EXPECT_EQ(First(slow), -0.25f);
    EXPECT_EQ(First(fast), -1);
  });
}

TEST(BaseTest, BFloat16AutocastWorksAsItIs) {
  RunTorchRanks(2, [](int rank) {
    torch::manual_seed(1);
    torch::nn::Linear layer(8, 8);
    DistributedOptimizer<SGD> optimizer(SGD(layer->parameters(), SGDOptions(0.1)),
                                        layer->named_parameters());
    const auto x = torch::full({4, 8}, 0.5f * static_cast<float>(rank + 1));
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    const auto output = layer(x);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    output.sum().backward();
    optimizer.synchronize();
    EXPECT_EQ(layer->weight.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(torch::equal(layer->weight.grad(), torch::full({8, 8}, 3.0f)));
  });
}

}  // namespace
}  // namespace sirtaki::tests
