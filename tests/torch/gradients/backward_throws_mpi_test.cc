// RANKS: 1 2 3
// A backward() that throws on one rank: what the others learn, and that the ranks go on together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

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

class BackwardThrowsTest : public testing::Test {
 protected:
  // Ranks that wait for an average too many say so soon.
  static void SetUpTestSuite() {
    init(InitOptions().set("stall_warning", "10s").set("stall_limit", "30s"));
  }
  static void TearDownTestSuite() { shutdown(); }
};

TEST_F(BackwardThrowsTest, ABackwardThatThrowsFailsOnEveryRank) {
  Part part("throws");
  const int last = size() - 1;
  for (int round = 0; round < 2; ++round) {  // with and without buckets
    part.optimizer.zero_grad();
    const std::string text = TextOf([&] {
      // The weight is reached, the bias is not.
      auto bias = rank() == last ? FailingBackward::apply(part.layer->bias) : part.layer->bias;
      (bias.sum() + part.layer->weight.sum()).backward();
    });
    if (rank() == last) {
      EXPECT_THAT(text, HasSubstr("no more memory"));
    } else {
      EXPECT_THAT(text, AllOf(HasSubstr("backward() has thrown"),
                              HasSubstr("rank " + std::to_string(last))));
    }
    // Also if nobody sees its gradients go.
    part.layer->zero_grad();
    part.Loss(Mine()).backward();
    part.ExpectGradient(MeanOfRanks());
    ExpectStillTrains(part);
  }
}

// An optimizer of parameters that an outer and an inner backward() meet.
struct Nested {
  explicit Nested(const std::string& name)
      : optimizer(
            SGD({parameters[0], parameters[1], parameters[2]}, SGDOptions(1.0)),
            NamedTensors{
                {"outer", parameters[0]}, {"failing", parameters[1]}, {"inner", parameters[2]}},
            Options().name(name)) {}
  void ExpectStillTrains() {
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      ((parameters[0] + parameters[1] + parameters[2]).sum() * Mine()).backward();
      for (const auto& parameter : parameters) {
        EXPECT_TRUE(torch::allclose(parameter.grad(), torch::full({2}, MeanOfRanks())));
      }
      optimizer.step();
    }
  }
  static torch::Tensor Ones() { return torch::ones({2}, torch::requires_grad()); }
  std::array<torch::Tensor, 3> parameters{Ones(), Ones(), Ones()};
  DistributedOptimizer<SGD> optimizer;
};

// The ranks run equally many averages, wherever one of them throws and whoever catches it, so that
// the next step fits together.
TEST_F(BackwardThrowsTest, ABackwardThatThrowsWithinAnother) {
  enum class Throws { kWithin, kBefore, kAfter };  // of the rank's inner backward()
  const int last = size() - 1;
  int number = 0;
  const auto run = [&](bool outer_first, bool caught, Throws throws) {
    SCOPED_TRACE(testing::Message() << outer_first << caught << static_cast<int>(throws));
    Nested nested("nested " + std::to_string(++number));
    const auto& [outer, failing, inner] = nested.parameters;
    for (int round = 0; round < 2; ++round) {  // with and without buckets
      nested.optimizer.zero_grad();
      std::function<void()> run_inner = [&] {
        const torch::AutoGradMode with_graph(true);
        // The last parameter is reached, the one that fails is not.
        const bool fails = rank() == last && throws == Throws::kWithin;
        const auto on_path = fails ? FailingBackward::apply(failing) : failing;
        const auto loss = (on_path.sum() + inner.sum()) * Mine();
        if (rank() == last && throws == Throws::kBefore) throw std::runtime_error("no more memory");
        const std::string text = TextOf([&] { loss.backward(); });
        if (!caught && !text.empty()) throw std::runtime_error(text);
        if (rank() == last && throws == Throws::kAfter) throw std::runtime_error("no more memory");
        // Another one within the same.
        if (text.empty()) return;
        EXPECT_NE(TextOf([&] { (failing.sum() * Mine()).backward(); }), "");
      };
      const auto call = reinterpret_cast<std::int64_t>(&run_inner);
      const auto x = torch::ones({1}, torch::requires_grad());
      const auto before = outer.sum() * Mine();
      const auto around = Inner::apply(x, call).sum();
      // What is made later in forward comes first in backward.
      auto loss = around + (outer_first ? outer.sum() * Mine() : before);
      const std::string text = TextOf([&] { loss.backward(); });
      if (rank() == last && !(caught && throws == Throws::kWithin)) {
        EXPECT_THAT(text, HasSubstr("no more memory"));
      } else {
        EXPECT_THAT(text, HasSubstr("has thrown"));
      }
      nested.ExpectStillTrains();
    }
  };
  for (const bool outer_first : {false, true}) {
    for (const bool caught : {false, true}) run(outer_first, caught, Throws::kWithin);
  }
  // Where the outer one has met nothing before, nobody waits for what this rank leaves out.
  for (const bool caught : {false, true}) run(true, caught, Throws::kBefore);
  run(true, false, Throws::kAfter);
}

// The inner backward() of the last rank throws before one gradient, that of the others behind all of
// them. The average fails that the latter have left, and so do the outer ones.
TEST_F(BackwardThrowsTest, InnerBackwardsThatThrowBeforeAndBehindAGradient) {
  enum class Outer { kBefore, kAfter, kNot, kNone };  // when the outer one meets a gradient, if any
  const int last = size() - 1;
  int number = 0;
  const auto run = [&](bool caught, Outer meets) {
    SCOPED_TRACE(testing::Message() << caught << static_cast<int>(meets));
    Nested nested("before and behind " + std::to_string(++number));
    const auto& [outer, failing, inner] = nested.parameters;
    const auto other = torch::ones({2}, torch::requires_grad());
    for (int round = 0; round < 2; ++round) {  // with and without buckets
      nested.optimizer.zero_grad();
      std::function<void()> run_inner = [&] {
        const torch::AutoGradMode with_graph(true);
        const auto comes_last = FailingBackward::apply(rank() == last ? failing : other).sum();
        auto loss = comes_last + inner.sum();
        if (rank() != last) loss = loss + failing.sum();
        if (meets != Outer::kBefore) loss = loss + outer.sum();
        const std::string text = TextOf([&] { loss.backward(); });
        EXPECT_THAT(text, HasSubstr("no more memory"));
        if (!caught) throw std::runtime_error(text);
      };
      const auto call = reinterpret_cast<std::int64_t>(&run_inner);
      const auto x = torch::ones({1}, torch::requires_grad());
      const auto older = outer.sum();
      auto loss = Inner::apply(x, call).sum();
      // The newer one comes first in backward.
      if (meets == Outer::kBefore) loss = loss + outer.sum();
      if (meets == Outer::kAfter) loss = loss + older;
      if (meets == Outer::kNone) {
        EXPECT_EQ(TextOf(run_inner).empty(), caught);
      } else {
        EXPECT_THAT(TextOf([&] { loss.backward(); }),
                    HasSubstr(caught ? "has thrown" : "no more memory"));
      }
      nested.ExpectStillTrains();
    }
  };
  for (const bool caught : {true, false}) {
    for (const Outer meets : {Outer::kBefore, Outer::kAfter, Outer::kNot, Outer::kNone}) {
      run(caught, meets);
    }
  }
}

// The others cannot know, and make their step.
TEST_F(BackwardThrowsTest, ABackwardThatThrowsWithAllGradientsSubmittedIsToldLater) {
  if (size() == 1) GTEST_SKIP() << "with one rank there is nobody to tell";
  Part part("throws late");
  for (int round = 0; round < 4; ++round) {  // with and without buckets
    const auto x = torch::ones({3}, torch::requires_grad());
    std::function<void()> run = [&] {
      const torch::AutoGradMode with_graph(true);
      part.layer->forward(rank() == 0 ? FailingBackward::apply(x) : x).sum().backward();
    };
    part.optimizer.zero_grad();
    const std::string text = TextOf([&] {
      if (round % 2 == 0) {
        run();
      } else {  // within another one, which meets none of the gradients
        const auto outer = torch::ones({1}, torch::requires_grad());
        Inner::apply(outer, reinterpret_cast<std::int64_t>(&run)).sum().backward();
      }
      part.optimizer.step();
    });
    if (rank() == 0) {
      EXPECT_THAT(text, HasSubstr("no more memory"));
    } else {
      EXPECT_THAT(text, IsEmpty());
    }
    part.optimizer.zero_grad();
    EXPECT_THAT(TextOf([&] { part.Loss(Mine()).backward(); }),
                AllOf(HasSubstr("after a backward() that has thrown on rank 0"),
                      HasSubstr("broadcast_parameters()")));
    broadcast_parameters(*part.layer, 1);
    ExpectStillTrains(part);
  }
}

TEST_F(BackwardThrowsTest, AnInnerBackwardOfTheLastPassThatThrowsLate) {
  if (size() == 1) GTEST_SKIP() << "with one rank there is nobody to tell";
  const auto a = torch::ones({2}, torch::requires_grad());
  const auto b = torch::ones({2}, torch::requires_grad());
  const NamedTensors named = {{"a", a}, {"b", b}};
  auto optimizer = DistributedOptimizer(SGD({a, b}, SGDOptions(1.0)), named,
                                        Options().name("late pass").backward_passes_per_step(2));
  const auto pass = [&] { ((a + b).sum() * Mine()).backward(); };
  pass();
  std::function<void()> run_inner = [&] {
    const torch::AutoGradMode with_graph(true);
    const auto other = torch::ones({2}, torch::requires_grad());
    const auto comes_last = rank() == 0 ? FailingBackward::apply(other) : other;
    const auto loss = comes_last.sum();
    (loss + b.sum()).backward();
  };
  const std::string text = TextOf([&] {
    const auto x = torch::ones({1}, torch::requires_grad());
    const auto around = Inner::apply(x, reinterpret_cast<std::int64_t>(&run_inner)).sum();
    (around + a.sum()).backward();
    optimizer.step();
  });
  if (rank() == 0) {
    EXPECT_THAT(text, HasSubstr("no more memory"));
  } else {
    EXPECT_THAT(text, IsEmpty());
  }
  optimizer.zero_grad();
  pass();
  EXPECT_THAT(TextOf(pass), HasSubstr("after a backward() that has thrown on rank 0"));
  optimizer.zero_grad();
  pass();
  pass();
  EXPECT_TRUE(torch::allclose(a.grad(), torch::full({2}, MeanOfRanks() * 2)));
}

// What an average has left is not what a step may use, if the next average has failed.
TEST_F(BackwardThrowsTest, AStepAfterAnAverageThatFailedAveragesAgain) {
  Part part("failed again");
  for (int round = 0; round < 2; ++round) {
    part.optimizer.zero_grad();
    part.Loss(Mine()).backward();
    EXPECT_NE(TextOf([&] {
                auto bias =
                    rank() == 0 ? FailingBackward::apply(part.layer->bias) : part.layer->bias;
                (bias.sum() + part.layer->weight.sum() * Mine()).backward();
              }),
              "");
    part.optimizer.step();
    check_parameters(*part.layer);
    ExpectStillTrains(part);
  }
}

TEST_F(BackwardThrowsTest, AClosureThatThrowsIsTriedAgain) {
  SmallNet net;
  auto optimizer = DistributedOptimizer(SGD(net.parameters(), SGDOptions(0.1)),
                                        net.named_parameters(), Options().name("thrown closure"));
  const auto step = [&](bool fails) {
    optimizer.step([&] {
      optimizer.zero_grad();
      const auto first = net.parameters().front();
      const auto on_path = fails && rank() == 0 ? FailingBackward::apply(first) : first;
      const auto last_met = 0 * on_path.sum();
      auto loss = Loss(net, BatchOfRank(0, rank())) + last_met;
      loss.backward();
      return loss;
    });
  };
  for (int round = 0; round < 2; ++round) {
    EXPECT_NE(TextOf([&] { step(true); }), "");
    step(false);
    check_parameters(net);
  }
}

// The others have called their hooks, whose collectives wait for this rank's.
TEST_F(BackwardThrowsTest, AHookIsCalledForAGradientThatIsRefused) {
  const auto hook = [](const GradientBucket& bucket) {
    const auto handle =
        allreduce_async(bucket.buffer, AllreduceOptions().name("hook/" + bucket.name));
    return [handle] { return synchronize(handle); };
  };
  Part part("refused by a hook", Options().hook(hook));
  const int last = size() - 1;
  for (int round = 0; round < 2; ++round) {
    part.optimizer.zero_grad();
    const std::string text = TextOf([&] {
      auto bias = rank() == last ? FailingBackward::apply(part.layer->bias) : part.layer->bias;
      (bias.sum() * 100 + part.layer->weight.sum() * 100).backward();
    });
    EXPECT_THAT(text, HasSubstr(rank() == last ? "no more memory" : "backward() has thrown"));
    ExpectStillTrains(part);
    part.optimizer.zero_grad();
    EXPECT_THAT(TextOf([&] {
                  part.layer->weight.pow(2).sum().backward({}, /*retain_graph=*/true,
                                                           /*create_graph=*/rank() == last);
                }),
                HasSubstr("create_graph"));
    part.layer->zero_grad();  // breaks the circle of the graph
    ExpectStillTrains(part);
  }
}

}  // namespace
}  // namespace sirtaki::tests
