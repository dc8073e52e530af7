// Where gradients lie: in memory that the ranks of the host share, and nowhere else.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "session/base/process_pool.h"
#include "sirtaki/barrier.h"
#include "sirtaki/optimizer.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using Sharing = session::InprocWorld::Sharing;
using torch::optim::SGD;
using torch::optim::SGDOptions;

bool InPool(const torch::Tensor& tensor) {
  return session::PoolOfProcess({}, 2)->Contains(tensor.data_ptr());
}

void RunPooled(int size, const std::function<void(int rank)>& body) {
  RunTorchRanks(size, body, {}, {}, Sharing::kPooled);
}

struct Wide : torch::nn::Module {
  Wide() : a(64, 64), b(64, 64) {
    register_module("a", a);
    register_module("b", b);
  }
  torch::Tensor loss(double factor) {
    return (b(torch::tanh(a(torch::ones({2, 64})))) * factor).sum();
  }
  torch::nn::Linear a;
  torch::nn::Linear b;
};

DistributedOptimizer<SGD> WrapWide(torch::nn::Module& net) {
  return DistributedOptimizer<SGD>(SGD(net.parameters(), SGDOptions(0.1)), net.named_parameters());
}

TEST(GradientMemoryTest, GradientsMoveToSharedMemoryOnce) {
  RunPooled(2, [](int rank) {
    Wide net;
    auto optimizer = WrapWide(net);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      net.loss(rank + 1).backward();
      std::vector<void*> places;
      for (const auto& parameter : net.parameters()) {
        EXPECT_TRUE(InPool(parameter.grad()));
        EXPECT_EQ(parameter.grad().strides(), parameter.strides());
        places.push_back(parameter.grad().data_ptr());
      }
      optimizer.step();
      std::size_t i = 0;
      std::int64_t needed = 0;
      std::int64_t held = 0;
      for (const auto& parameter : net.parameters()) {
        EXPECT_EQ(parameter.grad().data_ptr(), places[i++]) << "reduced where it lies";
        needed += static_cast<std::int64_t>(parameter.nbytes());
        held += static_cast<std::int64_t>(parameter.grad().storage().nbytes());
      }
      EXPECT_LE(held, needed + needed / 20);
    }
  });
}

// A lane may refer to what it has reduced for a moment longer than its handle is open.
bool ComesTo(std::int64_t expected, const std::function<std::int64_t()>& value) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (value() != expected && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  return value() == expected;
}

std::int64_t PoolBytes() { return session::PoolOfProcess({}, 2)->Use().in_use_bytes; }

TEST(GradientMemoryTest, IsThatOfTheGradientsAndGoesWithThem) {
  RunPooled(2, [](int rank) {
    barrier();
    const std::int64_t before = PoolBytes();
    barrier();
    torch::Tensor kept;
    {
      torch::nn::Sequential net(torch::nn::Linear(512, 512), torch::nn::Linear(512, 512));
      auto optimizer = WrapWide(*net);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        net->forward(torch::ones({2, 512})).sum().mul(rank + 1).backward();
        optimizer.step();
        barrier();
        std::int64_t needed = 0;
        for (const auto& p : net->parameters()) needed += static_cast<std::int64_t>(p.nbytes());
        EXPECT_GE(PoolBytes() - before, 2 * needed);
        const auto most = before + 2 * needed + 2 * needed / 20;
        EXPECT_TRUE(ComesTo(1, [&] { return PoolBytes() <= most ? 1 : 0; })) << step;
        barrier();
      }
      kept = net->parameters()[1].grad();
    }
    barrier();
    EXPECT_TRUE(ComesTo(before + 2 * ops::shm::Pool::SizeOfBlock(2048), PoolBytes));
    barrier();
    kept = torch::Tensor();
    barrier();
    EXPECT_TRUE(ComesTo(before, PoolBytes));
  });
}

TEST(GradientMemoryTest, ZeroedInPlaceTheyStayWhereTheyAre) {
  RunPooled(2, [](int rank) {
    Wide net;
    auto optimizer = WrapWide(net);
    void* place = nullptr;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad(/*set_to_none=*/false);
      net.loss(rank + 1).backward();
      optimizer.step();
      const auto gradient = net.a->weight.grad();
      EXPECT_TRUE(InPool(gradient));
      EXPECT_TRUE(place == nullptr || gradient.data_ptr() == place);
      place = gradient.data_ptr();
    }
  });
}

TEST(GradientMemoryTest, ASmallOneMovesIntoTheSameTensorUntilTheProgramKeepsIt) {
  RunPooled(2, [](int rank) {
    auto weight = torch::zeros({50}, torch::requires_grad());
    const NamedTensors names = {{"weight", weight}};
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1.0)), names);
    const auto step = [&](int number) {
      (weight.sum() * (rank + number)).backward();
      optimizer.step();
      EXPECT_TRUE(InPool(weight.grad()));
      EXPECT_TRUE(
          torch::equal(weight.grad(), torch::full({50}, static_cast<float>(number) + 0.5f)));
      EXPECT_FALSE(weight.grad().requires_grad());
    };
    step(1);
    const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> first(
        weight.grad().getIntrusivePtr());
    weight.mutable_grad().set_requires_grad(true);
    optimizer.zero_grad();
    EXPECT_EQ(first.use_count(), 1U);
    step(2);
    EXPECT_EQ(weight.grad().unsafeGetTensorImpl(), first._unsafe_get_target());
    const torch::Tensor kept = weight.grad();
    const torch::Tensor part = kept.slice(0, 10);
    for (int number = 3; number < 6; ++number) {
      optimizer.zero_grad();
      step(number);
      EXPECT_NE(weight.grad().unsafeGetTensorImpl(), kept.unsafeGetTensorImpl());
    }
    EXPECT_TRUE(torch::equal(kept, torch::full({50}, 2.5f)));
    EXPECT_TRUE(torch::equal(part, torch::full({40}, 2.5f)));
    const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> last(
        weight.grad().getIntrusivePtr());
    optimizer.zero_grad();
    EXPECT_EQ(last.use_count(), 0U);
  });
}

TEST(GradientMemoryTest, WhatTheProgramHoldsStaysAsItIs) {
  RunPooled(2, [](int rank) {
    auto weight = torch::zeros({5000}, torch::requires_grad());
    const NamedTensors names = {{"weight", weight}};
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1.0)), names);
    std::vector<torch::Tensor> kept;
    for (int step = 1; step <= 4; ++step) {
      optimizer.zero_grad();
      (weight.sum() * (rank + step)).backward();
      optimizer.step();
      kept.push_back(weight.grad());
    }
    for (std::size_t i = 0; i < kept.size(); ++i) {
      EXPECT_TRUE(torch::equal(kept[i], torch::full({5000}, static_cast<float>(i) + 1.5f))) << i;
    }
    // A gradient of the program's own, as a part of one flat tensor, is written where it is.
    const auto flat = torch::zeros({6000});
    weight.mutable_grad() = flat.slice(0, 500, 5500).detach();
    for (int step = 1; step <= 2; ++step) {
      optimizer.zero_grad(/*set_to_none=*/false);
      (weight.sum() * (rank + step)).backward();
      optimizer.step();
      EXPECT_EQ(flat.sum().item<float>(), 5000 * (static_cast<float>(step) + 0.5f));
      EXPECT_EQ(flat[499].item<float>(), 0);
    }
  });
}

TEST(GradientMemoryTest, OutlivesTheSession) {
  std::vector<torch::Tensor> kept(2);
  RunPooled(2, [&](int rank) {
    Wide net;
    auto optimizer = WrapWide(net);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      net.loss(rank + 1).backward();
      optimizer.step();
    }
    kept[static_cast<std::size_t>(rank)] = net.b->bias.grad();
  });
  for (const auto& gradient : kept) {
    EXPECT_TRUE(torch::equal(gradient, torch::full({64}, 3.0f)));
  }
}

TEST(GradientMemoryTest, FollowsTheLayoutOfItsParameter) {
  for (const Sharing sharing : {Sharing::kNone, Sharing::kDirect, Sharing::kPooled}) {
    RunTorchRanks(
        2,
        [sharing](int rank) {
          auto filter = torch::zeros({4, 3, 5, 5}).contiguous(torch::MemoryFormat::ChannelsLast);
          filter.requires_grad_();
          auto turned = torch::zeros({30, 20}).t().detach().requires_grad_();
          const NamedTensors names = {{"filter", filter}, {"turned", turned}};
          auto optimizer = DistributedOptimizer(SGD({filter, turned}, SGDOptions(1.0)), names);
          const auto wave = Waves({4, 3, 5, 5}, 1).to(torch::kFloat);
          const auto ramp = Waves({20, 30}, 2).to(torch::kFloat);
          for (int step = 0; step < 4; ++step) {
            optimizer.zero_grad();
            ((filter * wave).sum() + (turned * ramp).sum()).mul(rank + 1).backward();
            optimizer.step();
            EXPECT_TRUE(torch::allclose(filter.grad(), wave * 1.5f));
            EXPECT_TRUE(torch::allclose(turned.grad(), ramp * 1.5f));
            EXPECT_EQ(filter.grad().strides(), filter.strides());
            EXPECT_EQ(turned.grad().strides(), turned.strides());
            EXPECT_TRUE(step == 0 || sharing != Sharing::kPooled || InPool(filter.grad()));
          }
        },
        {}, {}, sharing);
  }
}

// A gradient that goes by itself arrives so where there was none, and where it has a graph.
TEST(GradientMemoryTest, FollowsTheLayoutOfItsParameterWhereThereIsNone) {
  for (const Average at : {Average::Backward, Average::Step}) {
    RunTorchRanks(2, [at](int rank) {
      auto filter = torch::zeros({4, 3, 5, 5}).contiguous(torch::MemoryFormat::ChannelsLast);
      filter.requires_grad_();
      auto optimizer =
          DistributedOptimizer(SGD({filter}, SGDOptions(1.0)), NamedTensors{{"filter", filter}},
                               DistributedOptimizerOptions().average_at(at));
      const auto wave = Waves({4, 3, 5, 5}, 1).to(torch::kFloat);
      if (rank == 0) (filter * wave).sum().backward();
      optimizer.synchronize();
      optimizer.step();
      EXPECT_TRUE(torch::allclose(filter.grad(), wave * 0.5f));
      EXPECT_EQ(filter.grad().strides(), filter.strides());
      if (at == Average::Backward) return;  // hooks refuse graphs

      optimizer.zero_grad(/*set_to_none=*/true);
      filter.pow(2).mul(wave).sum().backward({}, /*keep_graph=*/true, /*create_graph=*/true);
      optimizer.step();
      EXPECT_EQ(filter.grad().strides(), filter.strides());
    });
  }
}

// Ranks whose parameters lie differently go gradient by gradient.
TEST(GradientMemoryTest, OfParametersThatLieDifferently) {
  RunPooled(2, [](int rank) {
    auto weight = rank == 0 ? torch::zeros({3, 2}) : torch::zeros({2, 3}).t().detach();
    weight.requires_grad_();
    const NamedTensors names = {{"weight", weight}};
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1.0)), names);
    const auto ramp = torch::arange(6, torch::kFloat).reshape({3, 2});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      (weight * ramp * (rank + 1)).sum().backward();
      optimizer.step();
      EXPECT_TRUE(torch::equal(weight.grad(), ramp * 1.5f)) << step;
    }
  });
}

TEST(GradientMemoryTest, OneWithAGraphIsAveragedInACopy) {
  RunPooled(2, [](int rank) {
    auto weight = torch::ones({3}, torch::requires_grad());
    const NamedTensors names = {{"weight", weight}};
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1.0)), names,
                                          DistributedOptimizerOptions().average_at(Average::Step));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto value = (weight * weight).sum() * (rank + 1);
      value.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
      const auto own = weight.grad();
      const auto before = own.detach().clone();
      optimizer.synchronize();
      EXPECT_TRUE(torch::equal(own.detach(), before));
      EXPECT_FALSE(weight.grad().requires_grad());
      EXPECT_TRUE(torch::equal(weight.grad(), before / (rank + 1) * 1.5));
      optimizer.step();
    }
  });
}

}  // namespace
}  // namespace sirtaki::tests
