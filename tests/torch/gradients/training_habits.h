// Every optimizer with every habit of training, by one process and by a rank.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/config/config.h"
#include "sirtaki/optimizer.h"
#include "tests/torch/training.h"

namespace sirtaki::tests::habits {

constexpr int kSteps = 20;

constexpr double kMaxNorm = 0.1;

// Sums of three ranks have the same bits in two runs only so.
inline core::Config Deterministic() {
  core::Config config;
  config.deterministic = true;
  return config;
}

enum class Kind { kMomentum, kNesterov, kAdam, kAdamW, kRmsProp, kAdagrad, kLbfgs };
enum class Habit {
  kPlain,
  kZeroInPlace,
  kAccumulate,
  kNoSync,
  kClip,
  kFreeze,
  kUnused,
  kTwoParts,
  kTwoOfTheSame
};

struct HabitNet : SmallNet {
  HabitNet() {
    sometimes = register_parameter("sometimes", 0.3 * Waves({3}, 9));
    never = register_parameter("never", Waves({2}, 10));
  }
  torch::Tensor sometimes;
  torch::Tensor never;
};

inline int PartsOf(Habit habit) {
  return habit == Habit::kAccumulate || habit == Habit::kNoSync ? 2 : 1;
}

// What rank `rank` has to learn from part `part` of a step.
inline torch::Tensor RankLoss(HabitNet& net, Habit habit, int step, int part, int rank) {
  const int parts = PartsOf(habit);
  const Batch batch = BatchOfRank(step * parts + part, rank);
  auto output = net.forward(batch.x);
  // Another graph in each step, and on each rank; in some steps nobody has the parameter.
  const bool uses = habit == Habit::kUnused && step % 5 != 4 && (step + rank) % 2 == 0;
  if (uses) output = output * net.sometimes;
  return torch::mse_loss(output, batch.y) / parts;
}

// An optimizer of one process or of one rank.
struct AnyOptimizer {
  std::shared_ptr<torch::optim::Optimizer> base;
  std::function<void(bool set_to_none)> zero_grad;
  std::function<std::shared_ptr<void>()> no_sync;
  std::function<void()> clip;
};

template <class Base>
AnyOptimizer Alone(Base base, bool* clipped) {
  AnyOptimizer any;
  const auto optimizer = std::make_shared<Base>(std::move(base));
  any.base = optimizer;
  any.zero_grad = [optimizer](bool set_to_none) { optimizer->zero_grad(set_to_none); };
  any.no_sync = [] { return nullptr; };
  any.clip = [optimizer, clipped] {
    for (auto& group : optimizer->param_groups()) {
      const double norm = torch::nn::utils::clip_grad_norm_(group.params(), kMaxNorm);
      *clipped = *clipped || norm > kMaxNorm;
    }
  };
  return any;
}

template <class Base>
AnyOptimizer Distributed(Base base, const torch::nn::Module& module, Habit habit,
                         DistributedOptimizerOptions options) {
  AnyOptimizer any;
  if (habit == Habit::kAccumulate) options.backward_passes_per_step(2);
  const auto optimizer = std::make_shared<DistributedOptimizer<Base>>(
      std::move(base), module.named_parameters(), options);
  any.base = optimizer;
  any.zero_grad = [optimizer](bool set_to_none) { optimizer->zero_grad(set_to_none); };
  any.no_sync = [optimizer] { return std::make_shared<detail::Scope>(optimizer->no_sync()); };
  any.clip = [optimizer] { clip_grad_norm_(*optimizer, kMaxNorm); };
  return any;
}

using Parameters = std::vector<torch::Tensor>;

template <class Use>
AnyOptimizer Make(Kind kind, Parameters p, const Use& use) {
  namespace optim = torch::optim;
  switch (kind) {
    case Kind::kMomentum:
      return use(optim::SGD(std::move(p), optim::SGDOptions(0.1).momentum(0.9)));
    case Kind::kNesterov:
      return use(optim::SGD(
          std::move(p), optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01)));
    case Kind::kAdam:
      return use(optim::Adam(std::move(p), optim::AdamOptions(0.01)));
    case Kind::kAdamW:
      return use(optim::AdamW(std::move(p), optim::AdamWOptions(0.01).amsgrad(true)));
    case Kind::kRmsProp:
      return use(optim::RMSprop(std::move(p), optim::RMSpropOptions(0.01).centered(true)));
    case Kind::kAdagrad:
      return use(optim::Adagrad(std::move(p), optim::AdagradOptions(0.05)));
    case Kind::kLbfgs:
      return use(optim::LBFGS(std::move(p), optim::LBFGSOptions(0.1).max_iter(3)));
  }
  throw std::logic_error("no such optimizer");
}

// The same loop for one process, where `make` gives a plain optimizer and `loss_of` the mean loss
// of all ranks, and for a rank.
inline Parameters Train(
    Kind kind, Habit habit,
    const std::function<AnyOptimizer(Kind, const HabitNet&, Parameters)>& make,
    const std::function<torch::Tensor(HabitNet&, int step, int part)>& loss_of) {
  HabitNet net;
  std::vector<AnyOptimizer> optimizers;
  if (habit == Habit::kTwoParts) {
    optimizers.push_back(make(kind, net, net.hidden->parameters()));
    optimizers.push_back(make(Kind::kMomentum, net, net.output->parameters()));
  } else {
    optimizers.push_back(make(kind, net, net.parameters()));
  }
  if (habit == Habit::kTwoOfTheSame) {
    optimizers.push_back(make(Kind::kMomentum, net, net.parameters()));
  }
  for (int step = 0; step < kSteps; ++step) {
    if (habit == Habit::kFreeze) {
      net.hidden->weight.requires_grad_(step >= 6 && step < 14);
      net.output->bias.requires_grad_(step < 10);
    }
    // A closure may run several times: the second optimizer waits for its last gradients.
    std::shared_ptr<void> hold_second;
    if (habit == Habit::kTwoParts && kind == Kind::kLbfgs) hold_second = optimizers[1].no_sync();
    const auto backward = [&] {
      for (AnyOptimizer& optimizer : optimizers) {
        optimizer.zero_grad(/*set_to_none=*/habit != Habit::kZeroInPlace);
      }
      torch::Tensor sum;
      for (int part = 0; part < PartsOf(habit); ++part) {
        std::shared_ptr<void> hold;
        if (habit == Habit::kNoSync && part == 0) hold = optimizers[0].no_sync();
        const auto loss = loss_of(net, step, part);
        loss.backward();
        sum = sum.defined() ? sum + loss.detach() : loss.detach();
      }
      // LBFGS runs away when clipping bends its idea of the curvature: it is clipped at the end.
      const bool may_clip = kind != Kind::kLbfgs || step == kSteps - 1;
      if (habit == Habit::kClip && may_clip) optimizers[0].clip();
      return sum;
    };
    // In the second half with a closure, which every optimizer takes.
    if (kind == Kind::kLbfgs || step >= kSteps / 2) {
      optimizers[0].base->step(backward);
    } else {
      backward();
      optimizers[0].base->step();
    }
    if (optimizers.size() > 1) optimizers[1].base->step();
  }
  return net.parameters();
}

inline Parameters TrainInOneProcess(Kind kind, Habit habit, int size) {
  bool clipped = false;
  Parameters trained = Train(
      kind, habit,
      [&clipped](Kind of, const HabitNet&, Parameters parameters) {
        return Make(of, std::move(parameters),
                    [&clipped](auto base) { return Alone(std::move(base), &clipped); });
      },
      [habit, size](HabitNet& net, int step, int part) {
        torch::Tensor loss = RankLoss(net, habit, step, part, 0);
        for (int rank = 1; rank < size; ++rank) {
          loss = loss + RankLoss(net, habit, step, part, rank);
        }
        return loss / size;
      });
  EXPECT_EQ(clipped, habit == Habit::kClip);
  return trained;
}

inline Parameters TrainAsRank(Kind kind, Habit habit, int rank,
                              const DistributedOptimizerOptions& options = {}) {
  return Train(
      kind, habit,
      [habit, &options](Kind of, const HabitNet& net, Parameters parameters) {
        return Make(of, std::move(parameters),
                    [&](auto base) { return Distributed(std::move(base), net, habit, options); });
      },
      [habit, rank](HabitNet& net, int step, int part) {
        return RankLoss(net, habit, step, part, rank);
      });
}

// What the last bits of a sum come to after 20 steps: more where a root or a history is divided by.
inline double ToleranceOf(Kind kind) { return kind == Kind::kLbfgs ? 1e-7 : 1e-10; }

inline std::string NameOf(const testing::TestParamInfo<std::tuple<Kind, Habit>>& info) {
  static const std::vector<std::string> kKinds = {"Momentum", "Nesterov", "Adam", "AdamW",
                                                  "RmsProp",  "Adagrad",  "Lbfgs"};
  static const std::vector<std::string> kHabits = {
      "Plain",  "ZeroInPlace", "Accumulate", "NoSync",       "Clip",
      "Freeze", "Unused",      "TwoParts",   "TwoOfTheSame",
  };
  return kKinds[static_cast<std::size_t>(std::get<0>(info.param))] + "_" +
         kHabits[static_cast<std::size_t>(std::get<1>(info.param))];
}

inline auto All() {
  return testing::Combine(
      testing::Values(Kind::kMomentum, Kind::kNesterov, Kind::kAdam, Kind::kAdamW, Kind::kRmsProp,
                      Kind::kAdagrad, Kind::kLbfgs),
      testing::Values(Habit::kPlain, Habit::kZeroInPlace, Habit::kAccumulate, Habit::kNoSync,
                      Habit::kClip, Habit::kFreeze, Habit::kUnused, Habit::kTwoParts,
                      Habit::kTwoOfTheSame));
}

}  // namespace sirtaki::tests::habits
