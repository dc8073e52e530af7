#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sirtaki/broadcast.h"
#include "sirtaki/optimizer.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;
namespace optim = torch::optim;

using OptimizerPtr = std::unique_ptr<optim::Optimizer>;
using Make = std::function<OptimizerPtr(SmallNet& net, double lr)>;

// Two groups of different options.
template <class Optimizer, class Options>
Make Grouped(const Options& first, const Options& second) {
  return [=](SmallNet& net, double lr) {
    Options of_hidden = first;
    of_hidden.lr(lr);
    return std::make_unique<Optimizer>(
        std::vector<optim::OptimizerParamGroup>{
            {net.hidden->parameters(), std::make_unique<Options>(of_hidden)},
            {net.output->parameters(), std::make_unique<Options>(second)}},
        first);
  };
}

struct Trainee {
  Trainee(const Make& make, double lr) : optimizer(make(net, lr)) {}
  void Train(int from, int to) {
    for (int n = from; n < to; ++n) {
      optimizer->step([&] {
        optimizer->zero_grad();
        auto loss = Loss(net, BatchOfRank(n, 0));
        loss.backward();
        return loss;
      });
    }
  }
  SmallNet net;
  OptimizerPtr optimizer;
};

// How many steps a rank has made when the root's state is broadcast.
using StepsBefore = std::function<int(int rank)>;

// Afterwards all ranks train as a root that has never heard of the others.
void ExpectGoesOnAsRoot(const Make& make, const StepsBefore& steps_before) {
  constexpr int kRoot = 1;
  Trainee lone(make, 0.02);
  lone.Train(0, steps_before(kRoot));
  lone.optimizer->param_groups()[0].options().set_lr(0.03);
  lone.Train(20, 25);
  for (const int size : {2, 3}) {
    RunTorchRanks(size, [&](int rank) {
      Trainee mine(make, rank == kRoot ? 0.02 : 0.5);
      mine.Train(10 * (rank != kRoot), 10 * (rank != kRoot) + steps_before(rank));
      if (rank == kRoot) mine.optimizer->param_groups()[0].options().set_lr(0.03);
      broadcast_parameters(mine.net, kRoot);
      broadcast_optimizer_state(*mine.optimizer, kRoot);
      EXPECT_EQ(mine.optimizer->param_groups()[0].options().get_lr(), 0.03);
      mine.Train(20, 25);
      EXPECT_EQ(Distance(mine.net.parameters(), lone.net.parameters()), 0) << rank;
    });
  }
}

void ExpectStateTravels(const Make& make) {
  ExpectGoesOnAsRoot(make, [](int rank) { return rank == 1 ? 3 : 0; });
  ExpectGoesOnAsRoot(make, [](int rank) { return rank == 1 ? 0 : 2; });
  ExpectGoesOnAsRoot(make, [](int rank) { return rank + 1; });
  ExpectGoesOnAsRoot(make, [](int) { return 0; });
}

TEST(BroadcastOptimizerStateTest, Sgd) {
  ExpectStateTravels(Grouped<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9).nesterov(true),
                                         optim::SGDOptions(0.05).momentum(0.5).dampening(0.1)));
}

TEST(BroadcastOptimizerStateTest, Adam) {
  ExpectStateTravels(Grouped<optim::Adam>(optim::AdamOptions(0.1).amsgrad(true),
                                          optim::AdamOptions(0.02).betas({0.7, 0.8})));
}

TEST(BroadcastOptimizerStateTest, AdamW) {
  ExpectStateTravels(Grouped<optim::AdamW>(optim::AdamWOptions(0.1).amsgrad(true),
                                           optim::AdamWOptions(0.02).weight_decay(0.3)));
}

TEST(BroadcastOptimizerStateTest, Rmsprop) {
  ExpectStateTravels(
      Grouped<optim::RMSprop>(optim::RMSpropOptions(0.1).momentum(0.5).centered(true),
                              optim::RMSpropOptions(0.02).alpha(0.8)));
}

TEST(BroadcastOptimizerStateTest, Adagrad) {
  ExpectStateTravels(Grouped<optim::Adagrad>(optim::AdagradOptions(0.1).lr_decay(0.01),
                                             optim::AdagradOptions(0.02)));
}

Make MakeLbfgs(int history) {
  return [history](SmallNet& net, double lr) {
    return std::make_unique<optim::LBFGS>(
        net.parameters(), optim::LBFGSOptions(lr).max_iter(3).history_size(history));
  };
}

TEST(BroadcastOptimizerStateTest, LbfgsWhoseHistoryIsFullOrNot) {
  ExpectStateTravels(MakeLbfgs(2));
  ExpectStateTravels(MakeLbfgs(50));
}

TEST(BroadcastOptimizerStateTest, LbfgsOfTheRootIsLeftAsItWas) {
  RunTorchRanks(2, [](int rank) {
    Trainee mine(MakeLbfgs(50), 0.1);
    if (rank == 0) mine.Train(0, 2);
    broadcast_optimizer_state(*mine.optimizer, 0);
    ASSERT_EQ(mine.optimizer->state().size(), 1u);
    const auto& state =
        static_cast<optim::LBFGSParamState&>(*mine.optimizer->state().begin()->second);
    EXPECT_EQ(state.al().has_value(), rank == 0);
    EXPECT_GT(state.func_evals(), 0);
  });
}

// Inherits save and load.
struct HalvingSgd : optim::SGD {
  using SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override {
    auto loss = SGD::step(std::move(closure));
    auto& options = param_groups()[0].options();
    options.set_lr(options.get_lr() / 2);
    return loss;
  }
};

// Keeps all it has outside of what LibTorch knows.
struct Impulse : optim::Optimizer {
  Impulse(std::vector<torch::Tensor> parameters, double lr)
      : Optimizer(std::move(parameters), std::make_unique<optim::SGDOptions>(lr)) {}
  torch::Tensor step(LossClosure closure) override {
    auto loss = closure();
    torch::NoGradGuard no_grad;
    const auto& parameters = param_groups()[0].params();
    speeds.resize(parameters.size());
    for (std::size_t i = 0; i < speeds.size(); ++i) {
      const auto& gradient = parameters[i].grad();
      speeds[i] = speeds[i].defined() ? 0.5 * speeds[i] + gradient : gradient.clone();
      parameters[i].sub_(param_groups()[0].options().get_lr() * speeds[i]);
    }
    return loss;
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    archive.write("lr", c10::IValue(param_groups()[0].options().get_lr()));
    archive.write("speeds", c10::IValue(speeds));
  }
  void load(torch::serialize::InputArchive& archive) override {
    c10::IValue lr;
    c10::IValue saved;
    archive.read("lr", lr);
    archive.read("speeds", saved);
    param_groups()[0].options().set_lr(lr.toDouble());
    speeds = saved.toTensorVector();
  }
  std::vector<torch::Tensor> speeds;
};

TEST(BroadcastOptimizerStateTest, OptimizersOfOnesOwn) {
  ExpectStateTravels([](SmallNet& net, double lr) {
    return std::make_unique<HalvingSgd>(net.parameters(), optim::SGDOptions(lr).momentum(0.9));
  });
  ExpectStateTravels(
      [](SmallNet& net, double lr) { return std::make_unique<Impulse>(net.parameters(), lr); });
}

TEST(BroadcastOptimizerStateTest, ThroughTheWrapper) {
  RunTorchRanks(2, [](int rank) {
    SmallNet net;
    optim::SGD sgd(net.parameters(), optim::SGDOptions(0.1).momentum(0.9));
    if (rank == 1) {
      Loss(net, BatchOfRank(0, 0)).backward();
      sgd.step();
      EXPECT_FALSE(sgd.state().empty());
    }
    auto optimizer = DistributedOptimizer(std::move(sgd), net.named_parameters());
    broadcast_optimizer_state(optimizer, 0);
    EXPECT_TRUE(optimizer.state().empty());
  });
}

TEST(BroadcastOptimizerStateTest, AParameterWithoutGradientHasNoStateAnywhere) {
  RunTorchRanks(2, [](int rank) {
    auto used = torch::ones({3}, torch::requires_grad());
    auto unused = torch::ones({3}, torch::requires_grad());
    optim::Adam adam({unused, used});
    for (auto& parameter : {used, unused}) {
      if (rank == 1 || parameter.is_same(used)) parameter.mutable_grad() = torch::ones({3});
    }
    adam.step();
    broadcast_optimizer_state(adam, 0);
    EXPECT_EQ(adam.state().count(used.unsafeGetTensorImpl()), 1u);
    EXPECT_EQ(adam.state().count(unused.unsafeGetTensorImpl()), 0u);
  });
}

TEST(BroadcastOptimizerStateTest, AParameterThatStandsTwiceKeepsItsState) {
  RunTorchRanks(2, [](int rank) {
    auto tied = torch::ones({3}, torch::requires_grad());
    optim::SGD sgd({tied, tied}, optim::SGDOptions(0.1).momentum(0.9));
    tied.mutable_grad() = torch::ones({3});
    if (rank == 0) sgd.step();
    broadcast_optimizer_state(sgd, 0);
    EXPECT_TRUE(sgd.param_groups()[0].params()[1].is_same(tied));
    ASSERT_EQ(sgd.state().size(), 1u);
    const auto& state = sgd.state().at(tied.unsafeGetTensorImpl());
    ASSERT_NE(state, nullptr);
    // The buffer becomes the gradient, and is 0.9 + 1 after the second place's turn.
    EXPECT_TRUE(torch::allclose(static_cast<optim::SGDParamState&>(*state).momentum_buffer(),
                                torch::full({3}, 1.9)));
  });
}

TEST(BroadcastOptimizerStateTest, TensorsLargerThanWhatIsMovedAtOnce) {
  RunTorchRanks(2, [](int rank) {
    // 20 MB, 4 B, 9 MB: what is moved at once ends within the first and within the last.
    std::vector<torch::Tensor> parameters;
    for (const std::int64_t count : {5'000'000, 1, 2'250'000}) {
      parameters.push_back(torch::zeros({count}, torch::requires_grad()));
      parameters.back().mutable_grad() = torch::arange(count, torch::kFloat).remainder(1009) + rank;
    }
    optim::SGD sgd(parameters, optim::SGDOptions(0.1).momentum(0.9));
    sgd.step();
    broadcast_optimizer_state(sgd, 1);
    for (const auto& parameter : parameters) {
      const auto& state = *sgd.state().at(parameter.unsafeGetTensorImpl());
      const auto& buffer = static_cast<const optim::SGDParamState&>(state).momentum_buffer();
      EXPECT_TRUE(torch::equal(
          buffer, torch::arange(parameter.numel(), torch::kFloat).remainder(1009) + 1));
    }
  });
}

TEST(BroadcastOptimizerStateTest, OptimizersThatDifferAreRefused) {
  RunTorchRanks(2, [](int rank) {
    auto a = torch::zeros({2}, torch::requires_grad());
    auto b = torch::zeros({rank + 3}, torch::requires_grad());
    optim::SGD sgd({a, b}, optim::SGDOptions(0.1));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { broadcast_optimizer_state(sgd, 0); }),
                AllOf(HasSubstr("parameter 1 of group 0"), HasSubstr("[3] on rank 0")));

    OptimizerPtr other = std::make_unique<optim::Adam>(std::vector<torch::Tensor>{a});
    if (rank == 1) other = std::make_unique<optim::AdamW>(std::vector<torch::Tensor>{a});
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { broadcast_optimizer_state(*other, 0); }),
                AllOf(HasSubstr("torch::optim::Adam on rank 0"), HasSubstr("AdamW on rank 1")));

    optim::SGD grouped({a}, optim::SGDOptions(0.1));
    if (rank == 0) grouped.add_param_group(optim::OptimizerParamGroup({}));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { broadcast_optimizer_state(grouped, 0); }),
                AllOf(HasSubstr("group 1 with torch::optim::SGDOptions on rank 0"),
                      HasSubstr("nothing more on rank 1")));

    optim::SGD alike({a}, optim::SGDOptions(0.1));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { broadcast_optimizer_state(alike, 2); }),
                HasSubstr("root rank 2"));
  });
}

struct Forgetful : optim::SGD {
  using SGD::SGD;
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}
};

TEST(BroadcastOptimizerStateTest, StateThatIsNotSavedIsAnErrorOnAllRanks) {
  RunTorchRanks(2, [](int rank) {
    auto w = torch::ones({3}, torch::requires_grad());
    Forgetful sgd({w}, optim::SGDOptions(0.1).momentum(0.9));
    broadcast_optimizer_state(sgd, 0);  // has none yet
    w.mutable_grad() = torch::ones({3});
    if (rank == 0) sgd.step();
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { broadcast_optimizer_state(sgd, 0); }),
                AllOf(HasSubstr("restored the state of 0 parameters of 1"),
                      HasSubstr("override its save() and load()"), HasSubstr("on rank 1")));
  });
}

struct Failing : optim::SGD {
  Failing(const std::vector<torch::Tensor>& parameters, bool saves, bool loads)
      : SGD(parameters, optim::SGDOptions(0.1)), can_save(saves), can_load(loads) {}
  void save(torch::serialize::OutputArchive& archive) const override {
    if (!can_save) throw std::runtime_error("no ink");
    SGD::save(archive);
  }
  void load(torch::serialize::InputArchive& archive) override {
    if (!can_load) throw std::runtime_error("no glasses");
    SGD::load(archive);
  }
  bool can_save;
  bool can_load;
};

TEST(BroadcastOptimizerStateTest, WhatOneRankCannotDoIsThrownOnAll) {
  RunTorchRanks(3, [](int rank) {
    const std::vector<torch::Tensor> parameters = {torch::ones({3}, torch::requires_grad())};
    Failing no_save(parameters, rank != 1, true);
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { broadcast_optimizer_state(no_save, 1); }),
                AllOf(HasSubstr("cannot be saved: no ink"), HasSubstr("on rank 1")));
    Failing no_load(parameters, true, rank != 2);
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { broadcast_optimizer_state(no_load, 1); }),
                AllOf(HasSubstr("cannot be loaded: no glasses"), HasSubstr("on rank 2")));
    Failing works(parameters, true, true);
    broadcast_optimizer_state(works, 1);
  });
}

TEST(BroadcastOptimizerStateTest, AloneItChangesNothing) {
  RunTorchRanks(1, [](int) {
    Trainee mine(MakeLbfgs(50), 0.1);
    Trainee other(MakeLbfgs(50), 0.1);
    mine.Train(0, 2);
    other.Train(0, 2);
    broadcast_optimizer_state(*mine.optimizer, 0);
    mine.Train(2, 4);
    other.Train(2, 4);
    EXPECT_EQ(Distance(mine.net.parameters(), other.net.parameters()), 0);
    ErrorOf(ErrorCode::InvalidArgument, [&] { broadcast_optimizer_state(*mine.optimizer, 1); });
  });
}

}  // namespace
}  // namespace sirtaki::tests
