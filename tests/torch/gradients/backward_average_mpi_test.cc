// RANKS: 1 2 3
// `.grad` is the average when backward() returns, whatever the ranks' programs look like.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/torch/gradients/backward_average.h"
#include "tests/torch/gradients/part.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Options = DistributedOptimizerOptions;
using Tensors = std::vector<torch::Tensor>;

class BackwardAverageTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { init(); }
  static void TearDownTestSuite() { shutdown(); }
};

// ---- what every ported program does ----

// Wide enough for reductions to be under way when backward() has come to its end.
struct WideNet : torch::nn::Module {
  explicit WideNet(std::int64_t width) {
    in = register_parameter("in", 0.5 * Waves({5, width}, 1));
    out = register_parameter("out", 0.5 * Waves({width, 3}, 2));
  }
  torch::Tensor Loss(const Batch& batch) const {
    return torch::mse_loss(torch::tanh(batch.x.matmul(in)).matmul(out), batch.y);
  }
  torch::Tensor in;
  torch::Tensor out;
};

void ClipByTorch(std::int64_t width, const Options& options) {
  constexpr int kSteps = 12;
  constexpr double kMaxNorm = 0.05;
  const auto make = [](Tensors p) { return SGD(std::move(p), SGDOptions(0.5).momentum(0.9)); };
  WideNet alone(width);
  auto plain = make(alone.parameters());
  WideNet net(width);
  auto optimizer = DistributedOptimizer(make(net.parameters()), net.named_parameters(), options);
  for (int step = 0; step < kSteps; ++step) {
    plain.zero_grad();
    alone.Loss(JoinedBatch(step, size())).backward();
    const double norm = torch::nn::utils::clip_grad_norm_(alone.parameters(), kMaxNorm);
    EXPECT_GT(norm, kMaxNorm) << "it clips";
    plain.step();

    optimizer.zero_grad();
    net.Loss(BatchOfRank(step, rank())).backward();
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(net.parameters(), kMaxNorm), norm, 1e-9 * norm);
    optimizer.step();
    check_parameters(net);
  }
  EXPECT_LT(Distance(net.parameters(), alone.parameters()), 1e-10);
}

TEST_F(BackwardAverageTest, ClippedByTorchBetweenBackwardAndStepFollowsOneProcess) {
  for (const std::int64_t width : {8, 20000}) ClipByTorch(width, {});
}

TEST_F(BackwardAverageTest, GradientsMayBeReadAndChangedAtOnce) {
  Part part("changed");
  for (int step = 0; step < 4; ++step) {
    part.layer->zero_grad();  // the module's: nobody sees it
    part.Loss(Mine()).backward();
    part.ExpectGradient(MeanOfRanks());
    part.layer->weight.grad().data().mul_(2);
    part.layer->bias.mutable_grad() = torch::zeros_like(part.layer->bias);
    const auto before = part.layer->weight.detach().clone();
    part.optimizer.step();
    EXPECT_TRUE(torch::allclose(part.layer->weight, before - 2 * MeanOfRanks()));
    EXPECT_TRUE(torch::allclose(part.layer->bias, torch::ones({2})));
  }
}

// ---- 1: the end of a backward submits for all that it touched, then waits ----

TEST_F(BackwardAverageTest, OptimizersInAnyOrderOrOnlyOneOfThem) {
  Part a("a");
  Part b("b");
  for (int step = 0; step < 9; ++step) {
    a.optimizer.zero_grad();
    b.optimizer.zero_grad();
    float of_a = MeanOfRanks();
    const int way = rank() == 0 ? 0 : (step + rank()) % 3;
    if (way == 0) {
      (a.Loss(Mine()) + b.Loss(Mine())).backward();
    } else if (way == 1) {
      (b.Loss(Mine()) + a.Loss(Mine())).backward();
    } else {
      b.Loss(Mine()).backward();
      a.optimizer.synchronize();
    }
    for (int r = 1; r < size(); ++r) {
      if ((step + r) % 3 == 2) of_a -= static_cast<float>(r + 1) / static_cast<float>(size());
    }
    a.ExpectGradient(of_a);
    b.ExpectGradient(MeanOfRanks());
    a.optimizer.step();
    b.optimizer.step();
  }
  check_parameters(*a.layer);
  check_parameters(*b.layer);
}

// One rank has no sparse gradient of either, so that both are reduced again in another form, which
// the ranks find out in another order.
TEST_F(BackwardAverageTest, FormsThatDifferOfTwoOptimizers) {
  const auto make = [](const torch::nn::Embedding& table, const std::string& name) {
    return DistributedOptimizer(SGD(table->parameters(), SGDOptions(1.0)),
                                table->named_parameters(), Options().name(name));
  };
  const torch::nn::EmbeddingOptions sparse = torch::nn::EmbeddingOptions(4, 2).sparse(true);
  torch::nn::Embedding first(sparse);
  torch::nn::Embedding second(sparse);
  auto a = make(first, "first");
  auto b = make(second, "second");
  Part c("dense");
  for (int step = 0; step < 3; ++step) {
    a.zero_grad();
    b.zero_grad();
    c.optimizer.zero_grad();
    const auto row = torch::tensor({rank() % 4});
    auto loss = c.Loss(1);
    if (rank() == 0) {
      loss = loss + first(row).sum() + second(row).sum();
      loss.backward();
    } else if (rank() == 1) {
      loss.backward();
      b.synchronize();
      a.synchronize();
    } else {
      (second(row).sum() + loss).backward();
      a.synchronize();
    }
    EXPECT_NEAR(first->weight.grad().to_dense().sum().item<double>(), 2.0 / size(), 1e-6);
    EXPECT_NEAR(second->weight.grad().to_dense().sum().item<double>(),
                2.0 * (size() > 2 ? 2 : 1) / size(), 1e-6);
    c.ExpectGradient(1);
    a.step();
    b.step();
    c.optimizer.step();
  }
}

// ---- 2: a rank whose backward touches nothing of an optimizer ----

TEST_F(BackwardAverageTest, ARankWithoutABackwardSynchronizes) {
  Part part("without");
  for (int step = 0; step < 4; ++step) {
    part.optimizer.zero_grad();
    if (rank() == 0) part.Loss(2).backward();
    if (rank() != 0) part.optimizer.synchronize();
    part.ExpectGradient(2 / static_cast<float>(size()));
    part.optimizer.step();
  }
  check_parameters(*part.layer);
}

TEST_F(BackwardAverageTest, AStepWithoutABackwardNamesTheRankOnAllOfThem) {
  if (size() == 1) GTEST_SKIP() << "with one rank there is nothing to miss";
  Part part("missed");
  for (int round = 0; round < 2; ++round) {  // with and without buckets
    ExpectStillTrains(part);
    part.optimizer.zero_grad();
    const std::string text = TextOf([&] {
      if (rank() != 1) part.Loss(1).backward();
      part.optimizer.step();
    });
    EXPECT_THAT(text, AllOf(HasSubstr("in step() on rank 1"), HasSubstr("synchronize()"),
                            HasSubstr("average_at")));
  }
  ExpectStillTrains(part);
}

TEST_F(BackwardAverageTest, AStepWithoutABackwardOnAnyRank) {
  Part part("nothing");
  part.optimizer.step();
  EXPECT_FALSE(part.layer->weight.grad().defined());
  {
    const auto hold = part.optimizer.no_sync();
    part.Loss(Mine()).backward();
    part.ExpectGradient(Mine());
  }
  part.optimizer.step();
  part.ExpectGradient(MeanOfRanks());
  ExpectStillTrains(part);
}

// ---- 3: several backward() ----

TEST_F(BackwardAverageTest, TwoLossesAndARetainedGraph) {
  Part part("two losses");
  for (int step = 0; step < 3; ++step) {
    part.optimizer.zero_grad();
    part.Loss(Mine()).backward();
    part.ExpectGradient(MeanOfRanks());
    const auto loss = part.Loss(10 * Mine());
    loss.backward({}, /*retain_graph=*/true);
    part.ExpectGradient(11 * MeanOfRanks());
    loss.backward();
    part.ExpectGradient(21 * MeanOfRanks());
    part.optimizer.step();
  }
  check_parameters(*part.layer);
}

// Two losses are what programs for one process have: without no_sync, and without a number of passes.
TEST_F(BackwardAverageTest, AGanFollowsOneProcess) {
  struct Gan {
    SmallNet generator;
    torch::nn::Linear discriminator{3, 1};
    Gan() {
      discriminator->to(torch::kDouble);
      torch::NoGradGuard no_grad;
      for (auto& parameter : discriminator->parameters())
        parameter.copy_(Waves(parameter.sizes(), 3));
    }
  };
  const auto make = [](Tensors p) { return SGD(std::move(p), SGDOptions(0.1).momentum(0.9)); };
  const auto train = [](Gan& gan, auto& of_g, auto& of_d,
                        const std::function<Batch(int)>& batch_of) {
    for (int step = 0; step < 6; ++step) {
      const Batch batch = batch_of(step);
      of_d.zero_grad();
      const auto fake = gan.generator.forward(batch.x);
      torch::softplus(-gan.discriminator(batch.y)).mean().backward();
      torch::softplus(gan.discriminator(fake.detach())).mean().backward();
      of_d.step();
      of_g.zero_grad();
      torch::softplus(-gan.discriminator(fake)).mean().backward();
      of_g.step();
    }
  };
  Gan alone;
  auto plain_g = make(alone.generator.parameters());
  auto plain_d = make(alone.discriminator->parameters());
  train(alone, plain_g, plain_d, [](int step) { return JoinedBatch(step, size()); });
  Gan gan;
  auto of_g = DistributedOptimizer(make(gan.generator.parameters()),
                                   gan.generator.named_parameters(), Options().name("generator"));
  auto of_d =
      DistributedOptimizer(make(gan.discriminator->parameters()),
                           gan.discriminator->named_parameters(), Options().name("discriminator"));
  train(gan, of_g, of_d, [](int step) { return BatchOfRank(step, rank()); });
  EXPECT_LT(Distance(gan.generator.parameters(), alone.generator.parameters()), 1e-12);
  EXPECT_LT(Distance(gan.discriminator->parameters(), alone.discriminator->parameters()), 1e-12);
}

TEST_F(BackwardAverageTest, AnInnerBackwardAverages) {
  for (const bool outer_first : {false, true}) {
    Part part(outer_first ? "outer first" : "inner first");
    auto& weight = part.layer->weight;
    auto& bias = part.layer->bias;
    for (int step = 0; step < 4; ++step) {
      part.optimizer.zero_grad();
      std::function<void()> inner = [&] {
        const torch::AutoGradMode with_graph(true);
        (weight.sum() * Mine()).backward();
        EXPECT_TRUE(torch::allclose(weight.grad(), torch::full_like(weight, MeanOfRanks())));
      };
      const auto call = reinterpret_cast<std::int64_t>(&inner);
      const auto x = torch::ones({1}, torch::requires_grad());
      auto last = bias.sum() * Mine();
      auto loss = Inner::apply(x, call).sum() + last;
      // What is made later in forward comes first in backward.
      if (outer_first) loss = Inner::apply(x, call).sum() + bias.sum() * Mine();
      loss.backward();
      part.ExpectGradient(MeanOfRanks());
      part.optimizer.step();
    }
    check_parameters(*part.layer);
  }
}

// Whether a rank has touched a gradient in no_sync() is nothing that the others know.
TEST_F(BackwardAverageTest, AStepAveragesAfterNoSyncThatTouchedNothingOnSomeRanks) {
  Part part("held");
  part.Loss(Mine()).backward();
  {
    const auto hold = part.optimizer.no_sync();
    if (rank() == 0) part.Loss(static_cast<float>(size())).backward();
  }
  part.optimizer.step();
  part.ExpectGradient(MeanOfRanks() + 1);
  check_parameters(*part.layer);
}

TEST_F(BackwardAverageTest, ASecondBackwardOnOneRankAlone) {
  if (size() == 1) GTEST_SKIP() << "with one rank there is no other";
  Part part("one more");
  ExpectStillTrains(part);
  part.optimizer.zero_grad();
  part.Loss(1).backward();
  const std::string text = TextOf([&] {
    if (rank() != 0) part.optimizer.step();
    part.Loss(1).backward();
  });
  EXPECT_THAT(
      text, AllOf(HasSubstr("by backward() number 2 of the step on rank 0"), HasSubstr("no_sync()"),
                  HasSubstr("backward_passes_per_step"), HasSubstr("average_at")));
  broadcast_parameters(*part.layer, 0);
  ExpectStillTrains(part);
}

TEST_F(BackwardAverageTest, AnInnerBackwardOrANoSyncOnOneRankAlone) {
  if (size() == 1) GTEST_SKIP() << "with one rank there is no other";
  for (const bool nested : {true, false}) {
    Part part(nested ? "one inner" : "one held");
    ExpectStillTrains(part);
    const std::string text = TextOf([&] {
      for (int step = 0; step < 2; ++step) {
        part.optimizer.zero_grad();
        std::function<void()> inner = [&] {
          const torch::AutoGradMode with_graph(true);
          if (nested && rank() == 0) part.layer->weight.sum().backward();
        };
        const auto x = torch::ones({1}, torch::requires_grad());
        const auto around = Inner::apply(x, reinterpret_cast<std::int64_t>(&inner)).sum();
        {
          std::optional<decltype(part.optimizer.no_sync())> held;
          if (!nested && rank() == 0) held.emplace(part.optimizer.no_sync());
          (around + part.layer->bias.sum()).backward();
        }
        part.optimizer.step();
      }
    });
    EXPECT_THAT(text,
                AllOf(HasSubstr("on rank 0"), HasSubstr("no_sync()"), HasSubstr("average_at")))
        << nested;
    EXPECT_THAT(text, HasSubstr(nested ? "backward_passes_per_step" : "in step() on rank 0"));
    broadcast_parameters(*part.layer, 0);
  }
}

// Without zero_grad() in it a closure adds to the average of its evaluation before, as one process
// adds to its gradient.
TEST_F(BackwardAverageTest, EvaluationsOfAClosureStartAnew) {
  for (const bool sum : {false, true}) {
    SmallNet net;
    auto of = sum ? Options().op(ReduceOp::Sum) : Options();
    auto optimizer = DistributedOptimizer(
        torch::optim::LBFGS(net.parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3)),
        net.named_parameters(), of.name(sum ? "closure of sums" : "closure"));
    SmallNet alone;
    torch::optim::LBFGS plain(alone.parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3));
    const std::string text = TextOf([&] {
      optimizer.step([&] {
        auto loss = Loss(net, BatchOfRank(0, rank()));
        loss.backward();
        return loss;
      });
    });
    if (sum) {
      EXPECT_THAT(text, AllOf(HasSubstr("holds an average"), HasSubstr("zero_grad()")));
      continue;
    }
    EXPECT_THAT(text, IsEmpty());
    plain.step([&] {
      auto loss = Loss(alone, JoinedBatch(0, size()));
      loss.backward();
      return loss;
    });
    EXPECT_LT(Distance(net.parameters(), alone.parameters()), 1e-12);
  }
}

TEST_F(BackwardAverageTest, WhatCannotBeAveragedAgainIsRefused) {
  const auto hook = [](const GradientBucket& bucket) {
    return [buffer = bucket.buffer.clone()] { return buffer; };
  };
  std::vector<Options> all = {Options().op(ReduceOp::Sum),
                              Options().compression(Compression::BF16)};
  all.push_back(Options().hook(hook));
  int number = 0;
  for (const Options& options : all) {
    Part part("again " + std::to_string(++number), options);
    part.Loss(1).backward();
    const std::string text = TextOf([&] { part.Loss(1).backward(); });
    EXPECT_THAT(text, AllOf(HasSubstr("weight"), HasSubstr("no_sync()"), HasSubstr("average_at"),
                            HasSubstr("backward_passes_per_step")))
        << number;
    part.optimizer.zero_grad();
    part.Loss(1).backward();
    // Nothing is left to add to.
    part.layer->zero_grad();
    part.Loss(1).backward();
    part.ExpectGradient(options.op() == ReduceOp::Sum ? static_cast<float>(size()) : 1);
    part.optimizer.step();
  }
}

// The second backward() finds no gradient; one that it does not reach holds a sum, and keeps it.
TEST_F(BackwardAverageTest, ASumThatNobodyAddsToIsNotSummedAgain) {
  for (const auto at : {Average::Backward, Average::Step}) {
    Part part(at == Average::Step ? "untouched in step" : "untouched",
              Options().op(ReduceOp::Sum).average_at(at));
    const float sum = static_cast<float>(size());
    part.Loss(1).backward();
    part.optimizer.synchronize();
    part.layer->bias.grad().mul_(0.5);  // as clipping does
    part.layer->weight.mutable_grad().reset();
    part.layer->weight.sum().backward();
    part.optimizer.synchronize();
    EXPECT_TRUE(torch::allclose(part.layer->weight.grad(), torch::full({2, 3}, sum)));
    EXPECT_TRUE(torch::allclose(part.layer->bias.grad(), torch::full({2}, sum / 2)));
    { const auto hold = part.optimizer.no_sync(); }
    part.optimizer.step();
    EXPECT_TRUE(torch::allclose(part.layer->weight.grad(), torch::full({2, 3}, sum)));
    part.optimizer.zero_grad();
    part.Loss(1).backward();
    part.optimizer.synchronize();
    part.ExpectGradient(sum);
  }
}

TEST_F(BackwardAverageTest, NoSyncAddsToASumWithoutLeave) {
  Part part("held sum", Options().op(ReduceOp::Sum));
  for (const bool reaches : {true, false}) {
    part.optimizer.zero_grad();
    part.Loss(1).backward();
    part.optimizer.step();  // and no zero_grad()
    {
      const auto hold = part.optimizer.no_sync();
      part.Loss(1).backward();
    }
    EXPECT_THAT(TextOf([&] {
                  auto loss = part.layer->bias.sum();
                  if (reaches) loss = loss + part.layer->weight.sum();
                  loss.backward();
                }),
                AllOf(HasSubstr("holds an average"), HasSubstr("zero_grad()")));
  }
  part.optimizer.zero_grad();
  part.Loss(1).backward();
  part.ExpectGradient(static_cast<float>(size()));
}

TEST_F(BackwardAverageTest, PassesAreCountedPerBackward) {
  Part part("passes", Options().op(ReduceOp::Sum).backward_passes_per_step(3));
  for (int step = 0; step < 3; ++step) {
    part.optimizer.zero_grad();
    for (int pass = 0; pass < 3; ++pass) {
      // The bias has one of three.
      auto loss = part.layer->weight.sum();
      if (pass == 1) loss = loss + part.layer->bias.sum();
      (loss * Mine()).backward();
    }
    const float sum = MeanOfRanks() * static_cast<float>(size());
    EXPECT_TRUE(torch::allclose(part.layer->weight.grad(), torch::full({2, 3}, 3 * sum)));
    EXPECT_TRUE(torch::allclose(part.layer->bias.grad(), torch::full({2}, sum)));
    part.optimizer.step();
  }
}

// ---- 4: gradients with a graph of their own ----

TEST_F(BackwardAverageTest, ADifferentiableGradientIsRefused) {
  Part part("graph");
  const auto backward = [](Part& of) {
    of.layer->weight.pow(2).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  };
  for (int round = 0; round < 2; ++round) {  // with and without buckets
    EXPECT_THAT(TextOf([&] { backward(part); }),
                AllOf(HasSubstr("weight"), HasSubstr("create_graph"), HasSubstr("average_at"),
                      HasSubstr("torch::autograd::grad")));
    part.layer->zero_grad();  // breaks the circle of the graph
    ExpectStillTrains(part);
  }
  Part in_step("graph in step", Options().average_at(Average::Step));
  backward(in_step);
  in_step.optimizer.step();
  in_step.layer->zero_grad();
}

// ---- 5: one at a time ----

TEST_F(BackwardAverageTest, TwoThreadsAtOnce) {
  Part part("threads");
  std::mutex mutex;
  std::condition_variable changed;
  bool inside = false;
  bool leave = false;
  std::function<void()> wait = [&] {
    std::unique_lock<std::mutex> lock(mutex);
    inside = true;
    changed.notify_all();
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(30), [&] { return leave; }));
  };
  std::string first_text;
  std::thread first([&] {
    const auto x = torch::ones({1}, torch::requires_grad());
    const auto loss =
        Inner::apply(x, reinterpret_cast<std::int64_t>(&wait)).sum() + part.layer->bias.sum();
    first_text = TextOf([&] { (loss + part.layer->weight.sum()).backward(); });
  });
  {
    std::unique_lock<std::mutex> lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(30), [&] { return inside; }));
  }
  const std::string text = TextOf([&] { part.layer->weight.sum().backward(); });
  {
    const std::lock_guard<std::mutex> lock(mutex);
    leave = true;
  }
  changed.notify_all();
  first.join();
  EXPECT_THAT(text, HasSubstr("weight"));
  EXPECT_THAT(text, HasSubstr("another thread runs a backward()"));
  EXPECT_THAT(first_text, IsEmpty()) << "the first goes on";
  ExpectStillTrains(part);
}

// ---- 6: several optimizers in one backward ----

TEST_F(BackwardAverageTest, OneEndsErrorSkipsNoOtherOptimizersEnd) {
  Part bad("bad");
  Part good("good");
  for (const bool bad_first : {true, false}) {
    bad.optimizer.zero_grad();
    good.optimizer.zero_grad();
    const auto of_bad = bad.layer->weight.pow(2).sum();
    const auto of_good = good.Loss(Mine());
    const auto loss = bad_first ? of_good + of_bad : of_bad + of_good;
    EXPECT_THAT(TextOf([&] { loss.backward({}, true, /*create_graph=*/true); }),
                HasSubstr("create_graph"));
    good.ExpectGradient(MeanOfRanks());
    bad.layer->zero_grad();
    good.layer->zero_grad();
  }
  ExpectStillTrains(bad);
  ExpectStillTrains(good);
}

TEST_F(BackwardAverageTest, ASharedParameterNotifiesAllItsOwners) {
  auto shared = torch::ones({2}, torch::requires_grad());
  auto own_a = torch::ones({2}, torch::requires_grad());
  auto own_b = torch::ones({2}, torch::requires_grad());
  const auto make = [](const NamedTensors& named, const std::string& name) {
    Tensors parameters;
    for (const auto& [_, parameter] : named) parameters.push_back(parameter);
    return DistributedOptimizer(SGD(parameters, SGDOptions(1.0)), named, Options().name(name));
  };
  auto a = make({{"shared", shared}, {"own", own_a}}, "a");
  auto b = make({{"shared", shared}, {"own", own_b}}, "b");
  for (int step = 0; step < 4; ++step) {
    a.zero_grad();
    b.zero_grad();
    auto loss = shared.sum() * Mine();
    if (rank() == 0) loss = loss + own_b.sum();
    loss.backward();
    EXPECT_TRUE(torch::allclose(shared.grad(), torch::full({2}, MeanOfRanks())));
    EXPECT_TRUE(torch::allclose(own_b.grad(), torch::full({2}, 1 / static_cast<float>(size()))));
    EXPECT_FALSE(own_a.grad().defined());
    a.step();
    b.step();
  }
}

// The check needs all ranks, and those that average at their backward() are not there.
TEST_F(BackwardAverageTest, AStepWithoutABackwardIsFoundBeforeParametersAreChecked) {
  if (size() == 1) GTEST_SKIP() << "with one rank there is nothing to miss";
  Part part("checked", Options().check_parameters_every(1));
  const std::string text = TextOf([&] {
    if (rank() != 1) part.Loss(1).backward();
    part.optimizer.step();
  });
  EXPECT_THAT(text, HasSubstr("in step() on rank 1"));
  ExpectStillTrains(part);
}

// ---- uneven data ----

TEST_F(BackwardAverageTest, ClippedAfterTheLowestRankHasJoined) {
  SmallNet net;
  auto optimizer = DistributedOptimizer(SGD(net.parameters(), SGDOptions(0.1).momentum(0.9)),
                                        net.named_parameters());
  for (int round = 0; round < 2; ++round) {
    // Rank 0 has the least.
    const int steps = 2 + rank();
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      Loss(net, BatchOfRank(step, rank())).backward();
      EXPECT_GT(clip_grad_norm_(optimizer, 0.01), 0);
      optimizer.step();
    }
    const int last = join();
    EXPECT_EQ(last, size() - 1);
    broadcast_parameters(net, last);
    broadcast_optimizer_state(optimizer, last);
    check_parameters(net);
  }
}

// A rank that has joined brings zeros where the others bring the average of before.
TEST_F(BackwardAverageTest, AnAverageIsNotAveragedAgainAfterARankHasJoined) {
  if (size() == 1) GTEST_SKIP() << "with one rank nobody has joined";
  Part part("joined");
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
  auto of_table = DistributedOptimizer(SGD(table->parameters(), SGDOptions(1.0)),
                                       table->named_parameters(), Options().name("joined table"));
  const float active = static_cast<float>(size() - 1) / static_cast<float>(size());
  for (int round = 0; round < 2; ++round) {  // with and without buckets
    if (rank() != 0) {
      part.optimizer.zero_grad();
      part.Loss(1).backward();
      part.ExpectGradient(active);
      EXPECT_THAT(TextOf([&] { part.Loss(1).backward(); }),
                  AllOf(HasSubstr("rank 0 has joined"), HasSubstr("no_sync()")));
      part.optimizer.zero_grad();
      {
        const auto hold = part.optimizer.no_sync();
        part.Loss(1).backward();
      }
      part.Loss(1).backward();
      part.ExpectGradient(2 * active);
      part.optimizer.step();

      // What no_sync() has added to an average is gone with it.
      {
        const auto hold = part.optimizer.no_sync();
        part.Loss(1).backward();
      }
      part.layer->zero_grad();
      part.Loss(1).backward();
      part.ExpectGradient(active);
      part.optimizer.step();

      const auto row = torch::tensor({1});
      of_table.zero_grad();
      table(row).sum().backward();
      EXPECT_NEAR(table->weight.grad().to_dense().sum().item<double>(), 2 * active, 1e-6);
      EXPECT_THAT(TextOf([&] { table(row).sum().backward(); }), HasSubstr("has joined"));
      of_table.zero_grad();
    }
    join();
    broadcast_parameters(*part.layer, size() - 1);
    ExpectStillTrains(part);
  }
}

}  // namespace
}  // namespace sirtaki::tests
