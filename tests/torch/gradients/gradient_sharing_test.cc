// What gradients share: memory with each other, buckets with another optimizer, and a layout that
// may change under them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "sirtaki/optimizer.h"
#include "tests/torch/gradients/overlap.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using Sharing = session::InprocWorld::Sharing;
using Tensors = std::vector<torch::Tensor>;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr auto kSharings = {Sharing::kNone, Sharing::kDirect, Sharing::kPooled};

DistributedOptimizer<SGD> WrapShared(const NamedTensors& names,
                                     Average average = Average::Backward) {
  Tensors parameters;
  for (const auto& [name, parameter] : names) parameters.push_back(parameter);
  return DistributedOptimizer<SGD>(SGD(parameters, SGDOptions(1.0)), names,
                                   DistributedOptimizerOptions().average_at(average));
}

torch::Tensor Ones(torch::IntArrayRef shape) { return torch::ones(shape, torch::requires_grad()); }

TEST(GradientSharingTest, OfTensorsThatAreConcatenated) {
  for (const Sharing sharing : kSharings) {
    RunTorchRanks(
        2,
        [](int rank) {
          const auto q = Ones({50, 3});
          const auto k = Ones({50, 3});
          const auto v = Ones({50, 3});
          auto optimizer = WrapShared({{"q", q}, {"k", k}, {"v", v}});
          const auto ramp = torch::arange(450, torch::kFloat).reshape({150, 3});
          for (int step = 0; step < 4; ++step) {
            optimizer.zero_grad();
            (torch::cat({q, k, v}) * ramp * (rank + 1)).sum().backward();
            optimizer.step();
            const auto all = torch::cat({q.grad(), k.grad(), v.grad()});
            EXPECT_TRUE(torch::equal(all, ramp * 1.5f)) << step;
          }
        },
        {}, {}, sharing);
  }
}

TEST(GradientSharingTest, PartsOfOneFlatTensorOfTheProgram) {
  for (const Sharing sharing : kSharings) {
    RunTorchRanks(
        2,
        [](int rank) {
          const auto a = Ones({3});
          const auto b = Ones({4});
          const auto flat = torch::zeros({7});
          a.mutable_grad() = flat.slice(0, 0, 3).detach();
          b.mutable_grad() = flat.slice(0, 3, 7).detach();
          auto optimizer = WrapShared({{"a", a}, {"b", b}});
          for (int step = 1; step < 5; ++step) {
            optimizer.zero_grad(/*set_to_none=*/false);
            // Its backward adds to b when a is on its way.
            const auto middle = b.sum() * static_cast<float>(step * (rank + 1));
            (a.sum() * static_cast<float>(rank + 1) + middle).backward();
            optimizer.step();
            const auto expected =
                torch::cat({torch::full({3}, 1.5f), torch::full({4}, 1.5f * step)});
            EXPECT_TRUE(torch::equal(flat, expected)) << step;
          }
        },
        {}, {}, sharing);
  }
}

TEST(GradientSharingTest, TheSameBytes) {
  for (const Sharing sharing : kSharings) {
    RunTorchRanks(
        2,
        [](int rank) {
          constexpr std::int64_t kCount = 3000;
          const auto a = Ones({kCount});
          const auto b = Ones({kCount});
          auto optimizer = WrapShared({{"a", a}, {"b", b}});
          const auto ramp = torch::arange(kCount, torch::kFloat);
          for (int step = 0; step < 4; ++step) {
            optimizer.zero_grad();
            ((a.view({1, kCount}) + b.view({1, kCount})) * ramp * (rank + 1)).sum().backward();
            optimizer.step();
            EXPECT_TRUE(torch::equal(a.grad(), ramp * 1.5f)) << step;
            EXPECT_TRUE(torch::equal(b.grad(), ramp * 1.5f)) << step;
            EXPECT_FALSE(a.grad().is_alias_of(b.grad()));
          }
        },
        {}, {}, sharing);
  }
}

// The gradient of a view is the tensor that the rest of the backward still reads.
TEST(GradientSharingTest, WithABackwardThatGoesOn) {
  core::Config config;
  config.bucket_bytes = 0;
  for (const Sharing sharing : kSharings) {
    RunTorchRanks(
        2,
        [](int rank) {
          constexpr std::int64_t kCount = 3000;
          const auto first = Ones({1, kCount});
          const auto added = Ones({kCount});
          auto optimizer = WrapShared({{"added", added}, {"first", first}});
          const auto ramp = torch::arange(kCount, torch::kFloat);
          WaitInBackward::Wait wait;
          wait.reduced = [&added] {
            // Another thread may be writing it.
            auto* const last = added.grad().data_ptr<float>() + kCount - 1;
            return std::atomic_ref<float>(*last).load() == (kCount - 1) * 1.5f;
          };
          for (int step = 0; step < 3; ++step) {
            optimizer.zero_grad();
            const auto below =
                WaitInBackward::apply(first * (rank + 1), reinterpret_cast<std::int64_t>(&wait));
            ((below + added.view({1, kCount})) * ramp * (rank + 1)).sum().backward();
            EXPECT_TRUE(wait.in_time);
            optimizer.step();
            EXPECT_TRUE(torch::equal(added.grad(), ramp * 1.5f)) << step;
            EXPECT_TRUE(torch::equal(first.grad()[0], ramp * 2.5f)) << step;
          }
        },
        config, {}, sharing);
  }
}

TEST(GradientSharingTest, WhatABackwardMakesAloneIsReducedWhereItLies) {
  RunTorchRanks(2, [](int rank) {
    torch::nn::Conv2d conv(2, 3, 3);
    torch::nn::Linear linear(12, 5);
    const Tensors parameters = {conv->weight, conv->bias, linear->weight, linear->bias};
    auto optimizer = WrapShared({{"conv weight", parameters[0]},
                                 {"conv bias", parameters[1]},
                                 {"weight", parameters[2]},
                                 {"bias", parameters[3]}});
    std::vector<const void*> made(parameters.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].register_hook(
          [&made, i](const torch::Tensor& gradient) { made[i] = gradient.data_ptr(); });
    }
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto hidden = conv(torch::ones({4, 2, 4, 4}) * (rank + 1)).flatten(1);
      linear(hidden).pow(2).sum().backward();
      optimizer.step();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_EQ(parameters[i].grad().data_ptr(), made[i]) << i << ", step " << step;
      }
    }
  });
}

// Adversarial training with several steps of the critic does so, and fine-tuning.
TEST(GradientSharingTest, BucketsWithAnOptimizerOfAPart) {
  RunTorchRanks(2, [](int rank) {
    const auto body = Ones({3});
    const auto head = Ones({4});
    auto all = WrapShared({{"body", body}, {"head", head}});
    for (int step = 0; step < 3; ++step) {
      all.zero_grad();
      ((body.sum() + head.sum()) * (rank + 1)).backward();
      all.step();
    }
    auto part = WrapShared({{"head", head}});
    for (int step = 0; step < 6; ++step) {
      part.zero_grad();
      (head.sum() * (rank + 1)).backward();
      part.step();
      EXPECT_TRUE(torch::equal(head.grad(), torch::full({4}, 1.5f))) << step;
      if (step % 3 < 2) continue;
      // One backward for both.
      all.zero_grad();
      ((body.sum() + head.sum()) * (rank + 1)).backward();
      part.step();
      all.step();
      EXPECT_TRUE(torch::equal(body.grad(), torch::full({3}, 1.5f))) << step;
      EXPECT_TRUE(torch::equal(head.grad(), torch::full({4}, 1.5f))) << step;
    }
  });
}

TEST(GradientSharingTest, BucketsWithAnOptimizerThatGoes) {
  RunTorchRanks(2, [](int rank) {
    const auto body = Ones({3});
    const auto head = Ones({4});
    std::optional<DistributedOptimizer<SGD>> all;
    all.emplace(WrapShared({{"body", body}, {"head", head}}));
    for (int step = 0; step < 2; ++step) {
      all->zero_grad();
      (body.sum() + head.sum()).backward();
      all->step();
    }
    auto part = WrapShared({{"head", head}});
    part.zero_grad();
    // Into a bucket that waits for the body.
    (head.sum() * (rank + 1)).backward();
    all.reset();
    for (int step = 0; step < 2; ++step) {
      part.step();
      EXPECT_TRUE(torch::equal(head.grad(), torch::full({4}, 1.5f))) << step;
      part.zero_grad();
      (head.sum() * (rank + 1)).backward();
    }
    part.synchronize();
  });
}

TEST(GradientSharingTest, ALayoutThatARankChanges) {
  for (const Sharing sharing : kSharings) {
    RunTorchRanks(
        2,
        [](int rank) {
          const auto filter = Ones({4, 3, 5, 5});
          const auto bias = Ones({4});
          auto optimizer = WrapShared({{"filter", filter}, {"bias", bias}});
          const auto ramp = torch::arange(300, torch::kFloat).reshape({4, 3, 5, 5});
          for (int step = 0; step < 5; ++step) {
            if (step == 2 && rank == 1) {
              auto changed = filter;
              changed.set_data(filter.detach().contiguous(torch::MemoryFormat::ChannelsLast));
            }
            optimizer.zero_grad();
            (((filter * ramp).sum() + bias.sum()) * (rank + 1)).backward();
            optimizer.step();
            EXPECT_TRUE(torch::equal(filter.grad(), ramp * 1.5f)) << step;
            EXPECT_TRUE(torch::equal(bias.grad(), torch::full({4}, 1.5f))) << step;
          }
        },
        {}, {}, sharing);
  }
}

// A rank without a batch calls neither zero_grad() nor backward().
void MakeNewBucketsBetweenTheSameSteps(Average average) {
  RunTorchRanks(2, [average](int rank) {
    const auto a = Ones({3});
    const auto b = Ones({4});
    const auto added = Ones({2});
    auto optimizer = WrapShared({{"a", a}, {"b", b}}, average);
    std::optional<DistributedOptimizer<SGD>> second;
    const auto steps = [&](int count, float expected, bool idle) {
      for (int step = 0; step < count; ++step) {
        if (!idle || rank == 0) {
          optimizer.zero_grad();
          (a.sum() + b.sum() + added.sum() * 0).backward();
        } else {
          for (const auto& parameter : {a, b, added}) parameter.mutable_grad() = torch::Tensor();
          if (average == Average::Backward) optimizer.synchronize();
          if (average == Average::Backward && second) second->synchronize();
        }
        optimizer.step();
        EXPECT_TRUE(torch::equal(a.grad(), torch::full({3}, expected))) << step;
      }
    };
    steps(3, 1, false);
    second.emplace(WrapShared({{"b", b}}, average));
    steps(2, 0.5f, true);
    steps(2, 1, false);
    optimizer.add_param_group(
        torch::optim::OptimizerParamGroup(Tensors{added}, std::make_unique<SGDOptions>(1.0)));
    optimizer.zero_grad();
    optimizer.step();
    steps(3, 0.5f, true);
    steps(2, 1, false);
  });
}

TEST(GradientSharingTest, NewBucketsBetweenTheSameSteps) {
  for (const Average average : {Average::Backward, Average::Step}) {
    MakeNewBucketsBetweenTheSameSteps(average);
  }
}

}  // namespace
}  // namespace sirtaki::tests
