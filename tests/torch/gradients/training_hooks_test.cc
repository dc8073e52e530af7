// Communication hooks: the buckets that they get, in which order, and what becomes of their results.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sirtaki/collectives.h"
#include "sirtaki/optimizer.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;
using testing::UnorderedElementsAre;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using HookOptions = DistributedOptimizerOptions;

core::Config HookLimits(std::int64_t bytes) {
  core::Config config;
  config.first_bucket_bytes = bytes;
  config.bucket_bytes = bytes;
  return config;
}

DistributedOptimizer<SGD> WrapHooked(const NamedTensors& names, const CommunicationHook& hook,
                                     HookOptions options = {}) {
  std::vector<torch::Tensor> parameters;
  for (const auto& [name, tensor] : names) parameters.push_back(tensor);
  return {SGD(std::move(parameters), SGDOptions(1.0)), names, options.hook(hook)};
}

torch::Tensor Parameter(torch::IntArrayRef shape, torch::ScalarType type = torch::kFloat) {
  return torch::zeros(shape, torch::TensorOptions(type).requires_grad(true));
}

// What the library would do itself.
CommunicationHook Averaging(const ProcessSet& set = {}) {
  return [set](const GradientBucket& bucket) {
    auto handle = allreduce_async_(bucket.buffer,
                                   AllreduceOptions().name(bucket.name + "/mean").process_set(set));
    return [handle] { return synchronize(handle); };
  };
}

// The same, and notes the buckets as they come.
CommunicationHook Noting(std::vector<GradientBucket>& seen, const ProcessSet& set = {}) {
  return [&seen, average = Averaging(set)](const GradientBucket& bucket) {
    GradientBucket copy = bucket;
    copy.buffer = bucket.buffer.clone();
    copy.gradients.clear();
    for (const auto& gradient : bucket.gradients) {
      EXPECT_TRUE(gradient.is_alias_of(bucket.buffer));
      copy.gradients.push_back(gradient.clone());
    }
    seen.push_back(std::move(copy));
    return average(bucket);
  };
}

// Only the gradient of a parameter that came behind zero_grad() is averaged in synchronize().
TEST(TrainingHooksTest, AHookGetsEachGradientOnceAStep) {
  for (const int until_late : {0, 3}) {
    RunTorchRanks(2, [until_late](int rank) {
      const auto a = Parameter({6});
      const auto b = Parameter({5});
      const auto late = Parameter({4});
      std::vector<GradientBucket> seen;
      auto optimizer = WrapHooked({{"a", a}, {"b", b}}, Noting(seen));
      for (int step = 0; step < until_late + 3; ++step) {
        seen.clear();
        optimizer.zero_grad();
        if (step == until_late) {
          optimizer.add_param_group(torch::optim::OptimizerParamGroup({late}));
        }
        (torch::cat({a, b, late}).sum() * (rank + 1)).backward();
        optimizer.synchronize();
        optimizer.step();
        if (step < until_late) late.mutable_grad().reset();
        std::vector<std::string> names;
        for (const GradientBucket& bucket : seen) {
          names.insert(names.end(), bucket.parameters.begin(), bucket.parameters.end());
        }
        if (step < until_late) {
          EXPECT_THAT(names, UnorderedElementsAre("a", "b"));
        } else {
          EXPECT_THAT(names, UnorderedElementsAre("a", "b", "added parameter 1"));
        }
        if (step == until_late) {
          EXPECT_THAT(seen.back().parameters, ElementsAre("added parameter 1"));
        }
      }
      EXPECT_EQ(a.detach()[0].item<float>(), -1.5F * static_cast<float>(until_late + 3));
      EXPECT_EQ(late.detach()[0].item<float>(), -1.5F * 3);
    });
  }
}

TEST(TrainingHooksTest, AHookGetsWholeBuckets) {
  for (const int size : {2, 3}) {
    RunTorchRanks(size, [size](int rank) {
      const auto a = Parameter({2, 3});
      const auto b = Parameter({5});
      const auto ramp = torch::arange(6, torch::kFloat).reshape({2, 3});
      std::vector<GradientBucket> seen;
      auto optimizer = WrapHooked({{"a", a}, {"b", b}}, Noting(seen));
      for (int step = 0; step < 3; ++step) {
        seen.clear();
        optimizer.zero_grad();
        ((a * ramp).sum() * (rank + 1) + b.sum() * 10 * (rank + 1)).backward();
        optimizer.step();
        EXPECT_TRUE(torch::allclose(a.grad(), ramp * (size + 1) / 2));
        EXPECT_TRUE(
            torch::allclose(b.grad(), torch::full({5}, 5.0F * static_cast<float>(size + 1))));
        if (step == 0) {
          ASSERT_THAT(seen, SizeIs(2));
          EXPECT_THAT(seen[0].parameters, ElementsAre("a"));
          EXPECT_THAT(seen[1].parameters, ElementsAre("b"));
          EXPECT_EQ(seen[1].index, 1);
          EXPECT_FALSE(seen[1].is_last);
          continue;
        }
        ASSERT_THAT(seen, SizeIs(1));
        const GradientBucket& bucket = seen[0];
        EXPECT_THAT(bucket.parameters, UnorderedElementsAre("a", "b"));
        EXPECT_EQ(bucket.index, 0);
        EXPECT_TRUE(bucket.is_last);
        ASSERT_THAT(bucket.gradients, SizeIs(2));
        const std::size_t of_a = bucket.parameters[0] == "a" ? 0 : 1;
        EXPECT_TRUE(bucket.parameter_tensors[of_a].is_same(a));
        EXPECT_TRUE(torch::equal(bucket.gradients[of_a], ramp * (rank + 1)));
        EXPECT_TRUE(torch::equal(bucket.buffer, torch::cat({bucket.gradients[0].view(-1),
                                                            bucket.gradients[1].view(-1)})));
      }
    });
  }
}

// The ranks' gradients become ready in opposite orders, and the hooks wait for each other, when they
// are called and in what they return.
TEST(TrainingHooksTest, AllRanksCallHooksInTheSameOrder) {
  for (const int size : {2, 3}) {
    std::vector<std::vector<std::string>> called(static_cast<std::size_t>(size));
    RunTorchRanks(
        size,
        [&called](int rank) {
          std::vector<torch::Tensor> w;
          for (int i = 0; i < 4; ++i) w.push_back(torch::ones({i + 1}, torch::requires_grad()));
          auto& mine = called[static_cast<std::size_t>(rank)];
          const auto hook = [&](const GradientBucket& bucket) {
            mine.push_back(bucket.name);
            const auto options = [&](const std::string& round) {
              return AllreduceOptions().name(bucket.name + round);
            };
            auto first = allreduce(bucket.buffer, options("/first"));
            return [&, first, second = options("/second")] { return allreduce(first, second); };
          };
          auto optimizer = WrapHooked({{"0", w[0]}, {"1", w[1]}, {"2", w[2]}, {"3", w[3]}}, hook);
          for (int step = 0; step < 3; ++step) {
            optimizer.zero_grad();
            torch::Tensor product = torch::ones({});
            for (std::size_t i = 0; i < 4; ++i) {
              product = (w[rank == 0 ? i : 3 - i] * product).sum();
            }
            product.backward();
            optimizer.synchronize();
            for (std::size_t i = 0; i < 4; ++i) {
              const float others = 24.0F / static_cast<float>(i + 1);
              EXPECT_TRUE(torch::allclose(w[i].grad(), torch::full_like(w[i], others))) << i;
            }
          }
        },
        HookLimits(1));
    EXPECT_THAT(called[0], SizeIs(12));
    EXPECT_THAT(called, Each(called[0]));
  }
}

TEST(TrainingHooksTest, GradientsThatAreAbsentAreZeros) {
  RunTorchRanks(2, [](int rank) {
    const auto used = Parameter({2});
    const auto sometimes = Parameter({3});
    const auto once = Parameter({2});
    const auto never = Parameter({2});
    std::vector<GradientBucket> seen;
    auto optimizer = WrapHooked(
        {{"used", used}, {"sometimes", sometimes}, {"once", once}, {"never", never}}, Noting(seen));
    for (int step = 0; step < 3; ++step) {
      seen.clear();
      optimizer.zero_grad();
      auto loss = used.sum() * (rank + 1);
      if (rank == 0) loss = loss + sometimes.sum() * 4;
      if (step == 0) loss = loss + once.sum();
      loss.backward();
      optimizer.step();
      EXPECT_TRUE(torch::equal(used.grad(), torch::full({2}, 1.5F)));
      EXPECT_TRUE(torch::equal(sometimes.grad(), torch::full({3}, 2.0F)));
      EXPECT_EQ(once.grad().defined(), step == 0);
      EXPECT_FALSE(never.grad().defined());
      if (step == 0) continue;
      ASSERT_THAT(seen, SizeIs(2)) << "a bucket, and the one that no rank has had";
      EXPECT_THAT(seen[0].parameters, UnorderedElementsAre("used", "sometimes", "once"));
      EXPECT_EQ(seen[0].buffer.sum().item<float>(), rank == 0 ? 2 + 12 : 4);
      EXPECT_THAT(seen[1].parameters, ElementsAre("never"));
    }
  });
}

TEST(TrainingHooksTest, WhatAHookHasReturnedIsCalledForABucketThatNobodyHasToo) {
  RunTorchRanks(
      2,
      [](int rank) {
        const auto a = Parameter({2});
        const auto b = Parameter({3});
        int begun = 0;
        int finished = 0;
        const auto hook = [&, average = Averaging()](const GradientBucket& bucket) {
          ++begun;
          return [&finished, finish = average(bucket)] {
            ++finished;
            return finish();
          };
        };
        auto optimizer = WrapHooked({{"a", a}, {"b", b}}, hook);
        for (int step = 0; step < 4; ++step) {
          optimizer.zero_grad();
          auto loss = a.sum() * (rank + 1);
          if (step != 2) loss = loss + b.sum();
          loss.backward();
          optimizer.step();
          EXPECT_EQ(begun, 2 * (step + 1));
          EXPECT_EQ(finished, begun) << "or its buffer would still be in use";
          EXPECT_EQ(b.grad().defined(), step != 2);
        }
      },
      HookLimits(1));
}

TEST(TrainingHooksTest, ABucketHoldsOneTypeUpToItsSize) {
  RunTorchRanks(
      2,
      [](int rank) {
        NamedTensors names;
        for (int i = 0; i < 6; ++i) {
          const auto type = i % 2 == 0 ? torch::kFloat : torch::kDouble;
          names.emplace_back(std::to_string(i), Parameter({4}, type));
        }
        std::vector<GradientBucket> seen;
        auto optimizer = WrapHooked(names, Noting(seen));
        for (int step = 0; step < 2; ++step) {
          seen.clear();
          optimizer.zero_grad();
          auto loss = torch::zeros({}, torch::kDouble);
          for (const auto& [name, tensor] : names) loss = loss + tensor.sum() * (rank + 1);
          loss.backward();
          optimizer.step();
          for (const auto& [name, tensor] : names) {
            EXPECT_TRUE(torch::equal(tensor.grad(), torch::full_like(tensor, 1.5))) << name;
          }
        }
        std::int64_t index = 0;
        for (const GradientBucket& bucket : seen) {
          EXPECT_EQ(bucket.index, index++);
          EXPECT_EQ(bucket.is_last, index == static_cast<std::int64_t>(seen.size()));
          EXPECT_LE(bucket.buffer.nbytes(), 48u);
          for (const auto& gradient : bucket.gradients) {
            EXPECT_EQ(gradient.scalar_type(), bucket.buffer.scalar_type());
          }
        }
        EXPECT_EQ(index, 5) << "two buckets of float32, and three of float64";
      },
      HookLimits(32));
}

// What the program has kept is no part of the buffer, which the next step writes.
TEST(TrainingHooksTest, EachGradientKeepsAMemoryOfItsOwn) {
  RunTorchRanks(2, [](int rank) {
    const auto filter =
        torch::zeros({2, 3, 4, 4}).contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_();
    const auto only_here = Parameter({3});
    const auto hook = [](const GradientBucket& bucket) {
      return [twice = bucket.buffer * 2] { return twice; };
    };
    auto optimizer = WrapHooked({{"filter", filter}, {"only", only_here}}, hook);
    const auto wave = Waves({2, 3, 4, 4}, 1).to(torch::kFloat);
    std::vector<torch::Tensor> kept;
    for (int step = 0; step < 4; ++step) {
      // The ranks would not be equal after such a hook, if they did not compute the same.
      optimizer.zero_grad(/*set_to_none=*/step != 3);
      auto loss = (filter * wave).sum() * (step + 1);
      if (rank == 0 || step == 0) loss = loss + only_here.sum();
      loss.backward();
      optimizer.synchronize();
      EXPECT_TRUE(torch::allclose(filter.grad(), wave * 2 * (step + 1)));
      EXPECT_EQ(filter.grad().strides(), filter.strides());
      if (step < 2) kept.push_back(filter.grad());
      EXPECT_FALSE(only_here.grad().is_alias_of(filter.grad()));
    }
    EXPECT_TRUE(torch::allclose(kept[0], wave * 2));
    EXPECT_TRUE(torch::allclose(kept[1], wave * 4));
  });
}

TEST(TrainingHooksTest, SparseGradientsMayBePartsOfABucket) {
  RunTorchRanks(2, [](int rank) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    const auto weight = Parameter({2});
    std::vector<GradientBucket> seen;
    auto optimizer = WrapHooked({{"table", table->weight}, {"weight", weight}}, Noting(seen),
                                HookOptions().sparse_as_dense(true));
    for (int step = 0; step < 3; ++step) {
      seen.clear();
      optimizer.zero_grad();
      (table(torch::tensor({rank, 3})).sum() + weight.sum() * rank).backward();
      optimizer.synchronize();
      EXPECT_TRUE(
          torch::equal(table->weight.grad().select(1, 0), torch::tensor({.5F, .5F, 0.F, 1.F})));
      EXPECT_TRUE(torch::equal(weight.grad(), torch::full({2}, .5F)));
      EXPECT_THAT(seen, SizeIs(step == 0 ? 2 : 1));
    }
  });
}

TEST(TrainingHooksTest, ProcessSetsHaveTheirOwn) {
  RunTorchRanks(4, [](int rank) {
    const ProcessSet low = add_process_set({0, 1});
    const ProcessSet high = add_process_set({2, 3});
    const ProcessSet& mine = rank < 2 ? low : high;
    const auto a = Parameter({2});
    const auto b = Parameter({3});
    std::vector<GradientBucket> seen;
    auto optimizer =
        WrapHooked({{"a", a}, {"b", b}}, Noting(seen, mine), HookOptions().process_set(mine));
    for (int step = 0; step < 3; ++step) {
      seen.clear();
      optimizer.zero_grad();
      (a.sum() * rank + b.sum() * 2 * rank).backward();
      optimizer.step();
      const float mean = rank < 2 ? 0.5F : 2.5F;
      EXPECT_TRUE(torch::equal(a.grad(), torch::full({2}, mean)));
      EXPECT_TRUE(torch::equal(b.grad(), torch::full({3}, 2 * mean)));
      EXPECT_THAT(seen, SizeIs(step == 0 ? 2 : 1));
    }
  });
}

// A bucket that cannot be averaged is taken apart, so that those after it do not wait for it.
TEST(TrainingHooksTest, AGradientThatIsRefusedDoesNotTakeTheOthersAlong) {
  for (const int size : {2, 3}) {
    RunTorchRanks(
        size,
        [size](int rank) {
          SmallNet net;
          std::vector<GradientBucket> seen;
          auto optimizer = WrapHooked(net.named_parameters().pairs(), Noting(seen));
          const auto train = [&](int step) {
            optimizer.zero_grad();
            seen.clear();
            Loss(net, BatchOfRank(step, rank)).backward();
            optimizer.step();
          };
          train(0);
          train(1);
          EXPECT_THAT(seen, SizeIs(2));
          optimizer.zero_grad();
          EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                              [&] {
                                net.output->weight.pow(2).sum().backward(
                                    {}, /*retain_graph=*/true, /*create_graph=*/rank == 0);
                              }),
                      AllOf(HasSubstr("output.weight"), HasSubstr("create_graph")));
          net.zero_grad();
          train(2);
          EXPECT_THAT(seen, SizeIs(testing::Ge(3u))) << "the gradients of one bucket by themselves";
          train(3);
          EXPECT_THAT(seen, SizeIs(2));
          const auto alone =
              TrainAlone([](auto parameters) { return SGD(parameters, SGDOptions(1.0)); }, 4, size);
          for (std::size_t i = 0; i < alone.size(); ++i) {
            EXPECT_TRUE(torch::allclose(net.parameters()[i], alone[i])) << i;
          }
        },
        HookLimits(200));
  }
}

TEST(TrainingHooksTest, AHookThatFailsNamesTheGradientsOfItsBucket) {
  RunTorchRanks(2, [](int rank) {
    const auto a = Parameter({1});
    const auto b = Parameter({1});
    int calls = 0;
    const auto hook = [&](const GradientBucket& bucket) {
      if (++calls == 3 && rank == 1) throw std::runtime_error("no room for the residual");
      return Averaging()(bucket);
    };
    auto optimizer = WrapHooked({{"a", a}, {"b", b}}, hook);
    EXPECT_THAT(ErrorOf(ErrorCode::Aborted,
                        [&] {
                          for (;;) {
                            optimizer.zero_grad();
                            (a + b).sum().backward();
                            optimizer.step();
                          }
                        }),
                AllOf(HasSubstr("the communication hook failed for the gradients of"),
                      HasSubstr("\"a\""), HasSubstr("\"b\""), HasSubstr("no room")));
  });
}

}  // namespace
}  // namespace sirtaki::tests
