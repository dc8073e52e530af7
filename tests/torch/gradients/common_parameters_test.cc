// The parameters of a sharded optimizer lie once for all ranks of a host, and a program that writes
// to them in between has the numbers that it has where each rank has a copy.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sirtaki/broadcast.h"
#include "sirtaki/collectives.h"
#include "sirtaki/optimizer.h"
#include "tests/torch/gradients/training_habits.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::HasSubstr;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

DistributedOptimizerOptions InShards(bool common = true) {
  return DistributedOptimizerOptions().shard(Shard::OptimizerState).share_parameters(common);
}

// Asks the system what is mapped where the tensor lies.
bool IsCommon(const torch::Tensor& tensor) {
  const auto at = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR, &begin, &end) != 2) continue;
    if (begin <= at && at < end) {
      return line.find("sirtaki parameters") != std::string::npos &&
             line.find("rw-p") != std::string::npos;
    }
  }
  return false;
}

// Parameters of several sizes and layouts: some belong to one rank as a whole.
std::vector<torch::Tensor> MixedWeights() {
  std::vector<torch::Tensor> weights = {
      Waves({130, 141}, 1).to(torch::kFloat),
      Waves({31, 9}, 2).to(torch::kFloat).t(),
      Waves({1}, 3).to(torch::kFloat),
      Waves({64, 40}, 4),
      torch::zeros({0}),
      Waves({4, 3, 5, 5}, 5).to(torch::kFloat).contiguous(torch::MemoryFormat::ChannelsLast)};
  for (torch::Tensor& weight : weights) weight = weight.clone().requires_grad_();
  return weights;
}

// A gradient without a pattern, another one on each rank.
void BackwardOfAll(const std::vector<torch::Tensor>& weights, int rank, int step) {
  for (const torch::Tensor& weight : weights) {
    (weight * Waves(weight.sizes(), 3.0 * rank + 7.0 * step).to(weight.dtype())).sum().backward();
  }
}

using Between = std::function<void(std::vector<torch::Tensor>& weights, int rank, int step)>;

// Trains, and calls `between` after each step. Returns the parameters at the end, and what the ranks
// have read in between.
std::vector<torch::Tensor> TrainInBetween(int rank, const DistributedOptimizerOptions& options,
                                          const Between& between = {}) {
  std::vector<torch::Tensor> weights = MixedWeights();
  std::vector<torch::Tensor> seen;
  auto optimizer = DistributedOptimizer(Adam(weights, AdamOptions(0.01)), options);
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    BackwardOfAll(weights, rank, step);
    optimizer.step();
    if (between) between(weights, rank, step);
    for (const torch::Tensor& weight : weights) seen.push_back(weight.detach().sum());
  }
  for (const torch::Tensor& weight : weights) seen.push_back(weight.detach().clone());
  return seen;
}

void ExpectSameTensors(const std::vector<torch::Tensor>& first,
                       const std::vector<torch::Tensor>& second, const std::string& what) {
  ASSERT_EQ(first.size(), second.size());
  for (std::size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(torch::equal(first[i], second[i])) << what << ", tensor " << i;
    EXPECT_EQ(first[i].strides(), second[i].strides()) << what << ", tensor " << i;
  }
}

void ExpectEqualOnAllRanks(const std::vector<torch::Tensor>& weights) {
  for (const torch::Tensor& weight : weights) {
    const torch::Tensor of_all = allgather(weight.detach().reshape({1, -1}));
    EXPECT_TRUE(torch::equal(of_all, of_all[0].expand_as(of_all)));
  }
}

// Whether the page in which the tensor begins is a copy of this rank's: there, and not the file's.
bool IsCopy(const torch::Tensor& tensor) {
  const auto at = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const volatile char touched = *static_cast<const char*>(tensor.const_data_ptr());
  static_cast<void>(touched);
  std::uint64_t entry = 0;
  const int table = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  const auto page = static_cast<off_t>(at / static_cast<std::uintptr_t>(getpagesize()));
  EXPECT_EQ(pread(table, &entry, sizeof(entry), page * 8), 8);
  close(table);
  return (entry >> 63 & 1) != 0 && (entry >> 61 & 1) == 0;
}

TEST(CommonParametersTest, RanksKeepOtherNumbersUntilTheyAreBroadcast) {
  RunTorchRanks(3, [](int rank) {
    std::vector<torch::Tensor> weights = MixedWeights();
    {
      const torch::NoGradGuard no_grad;
      if (rank == 1) weights[3].add_(1);
    }
    const auto was = weights[3].detach().clone();
    auto optimizer = DistributedOptimizer(Adam(weights, AdamOptions(0.01)), InShards());
    EXPECT_TRUE(IsCommon(weights[3]));
    EXPECT_TRUE(torch::equal(weights[3], was));
    EXPECT_EQ(IsCopy(weights[3]), rank == 1);
    EXPECT_FALSE(IsCopy(weights[0])) << "what all had alike is there once";
    barrier();
    broadcast_parameters(weights, 0);
    EXPECT_EQ(IsCopy(weights[0]), rank != 0);
    optimizer.zero_grad();
    ExpectEqualOnAllRanks(weights);
    for (const int i : {0, 3}) EXPECT_FALSE(IsCopy(weights[i])) << i;
    barrier();
  });
}

TEST(CommonParametersTest, OtherNumbersThatNoBroadcastHasMadeEqual) {
  RunTorchRanks(
      3,
      [](int rank) {
        const auto train = [&](bool common) {
          std::vector<torch::Tensor> weights = MixedWeights();
          {
            const torch::NoGradGuard no_grad;
            for (torch::Tensor& weight : weights) weight.add_(0.125 * rank);
          }
          auto optimizer = DistributedOptimizer(SGD(weights, SGDOptions(0.5)), InShards(common));
          std::vector<torch::Tensor> seen;
          for (int step = 0; step < 3; ++step) {
            for (const torch::Tensor& weight : weights) seen.push_back(weight.detach().clone());
            optimizer.zero_grad();
            BackwardOfAll({weights[0], weights[3 + step % 2 * 2]}, rank, step);
            optimizer.step();
          }
          return seen;
        };
        ExpectSameTensors(train(true), train(false), "other numbers");
      },
      habits::Deterministic());
}

TEST(CommonParametersTest, ARankThatHasGradientsWhenTheOptimizerIsMadeAgreesWithTheOthers) {
  RunTorchRanks(2, [](int rank) {
    const std::vector<torch::Tensor> weights = {Waves({90}, 1).to(torch::kFloat).requires_grad_()};
    const torch::Tensor other = weights[0].detach();  // so that nothing can be common
    if (rank == 0) BackwardOfAll(weights, rank, 7);
    auto optimizer = DistributedOptimizer(SGD(weights, SGDOptions(0.5)), InShards());
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      BackwardOfAll(weights, rank, step);
      optimizer.step();
      ExpectEqualOnAllRanks(weights);
      EXPECT_FALSE(IsCommon(weights[0]));
    }
  });
}

TEST(CommonParametersTest, LieOnceWhenTheOptimizerIsMade) {
  RunTorchRanks(2, [](int rank) {
    std::vector<torch::Tensor> weights = MixedWeights();
    const auto strides = weights[1].strides().vec();
    auto optimizer = DistributedOptimizer(Adam(weights, AdamOptions(0.01)), InShards());
    for (const torch::Tensor& weight : weights) EXPECT_EQ(IsCommon(weight), weight.numel() > 0);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      BackwardOfAll(weights, rank, step);
      const auto version = weights[0]._version();
      optimizer.step();
      EXPECT_GT(weights[0]._version(), version) << "autograd sees what the others have written";
      for (const torch::Tensor& weight : weights) {
        EXPECT_EQ(IsCommon(weight), weight.numel() > 0);
        EXPECT_TRUE(weight.requires_grad());
      }
      EXPECT_EQ(weights[1].strides().vec(), strides);
    }
    weights = MixedWeights();
    auto separate = DistributedOptimizer(Adam(weights, AdamOptions(0.01)), InShards(false));
    BackwardOfAll(weights, rank, 0);
    separate.step();
    EXPECT_FALSE(IsCommon(weights[0]));
  });
}

// ---- what programs do between steps ----

struct Usage {
  const char* name;
  // What a program does to its parameters, `kept` of which outlives the step.
  std::function<void(std::vector<torch::Tensor>& weights, std::vector<torch::Tensor>& kept,
                     int rank, int step)>
      between;
};

const std::vector<Usage>& Usages() {
  static const std::vector<Usage> usages = {
      {"nothing", [](auto&, auto&, int, int) {}},
      {"writes in place",
       [](auto& weights, auto&, int, int) {
         for (torch::Tensor& weight : weights) weight.mul_(0.9).add_(0.01);
       }},
      {"writes through another tensor, which leaves no version",
       [](auto& weights, auto&, int, int step) {
         if (step % 2 == 0) weights[0].data().clamp_(-0.3, 0.3);
         weights[3].data().select(0, 7).zero_();
       }},
      {"writes in one element",
       [](auto& weights, auto&, int, int step) { weights[0].view(-1)[3000 * step].fill_(step); }},
      {"takes averages for a while",
       [](auto& weights, auto& kept, int, int step) {
         if (kept.empty()) {
           for (const torch::Tensor& weight : weights) kept.push_back(weight.clone());
         }
         std::vector<torch::Tensor> swapped;
         for (std::size_t i = 0; i < weights.size(); ++i) {
           kept[i].mul_(0.5).add_(weights[i], 0.5);
           if (step % 2 == 0) continue;
           swapped.push_back(weights[i].clone());
           weights[i].copy_(kept[i]);
         }
         for (std::size_t i = 0; i < swapped.size(); ++i) weights[i].copy_(swapped[i]);
       }},
      {"loads on one rank and broadcasts",
       [](auto& weights, auto&, int rank, int step) {
         if (step != 2) return;
         if (rank == 1) {
           for (torch::Tensor& weight : weights) weight.fill_(0.25);
         }
         broadcast_parameters(weights, 1);
       }},
      {"gives parameters other memory",
       [](auto& weights, auto&, int, int step) {
         if (step == 1) weights[0].set_data(weights[0].detach().clone().mul_(2));
         if (step == 3) {
           for (torch::Tensor& weight : weights) weight.set_data(weight.detach().clone());
         }
       }},
      {"keeps a tensor in the memory of a parameter",
       [](auto& weights, auto& kept, int, int step) {
         if (step == 0) kept.push_back(weights[0].detach());
         kept[0].mul_(0.99);
         EXPECT_TRUE(torch::equal(kept[0], weights[0]));
       }},
  };
  return usages;
}

class CommonParametersUsageTest : public testing::TestWithParam<std::size_t> {};

TEST_P(CommonParametersUsageTest, HaveTheNumbersOfCopies) {
  const Usage& usage = Usages()[GetParam()];
  for (const auto& [size, shard] :
       {std::pair{3, Shard::OptimizerState}, std::pair{2, Shard::Gradients}}) {
    RunTorchRanks(
        size,
        [&, shard = shard](int rank) {
          const auto train = [&](bool common) {
            std::vector<torch::Tensor> kept;
            return TrainInBetween(rank, InShards(common).shard(shard),
                                  [&](std::vector<torch::Tensor>& weights, int of_rank, int step) {
                                    const torch::NoGradGuard no_grad;
                                    EXPECT_EQ(IsCommon(weights[3]), common) << usage.name;
                                    usage.between(weights, kept, of_rank, step);
                                  });
          };
          ExpectSameTensors(train(true), train(false), usage.name);
        },
        habits::Deterministic());
  }
}

INSTANTIATE_TEST_SUITE_P(All, CommonParametersUsageTest, testing::Range<std::size_t>(0, 8));

TEST(CommonParametersTest, AParameterWhoseMemoryOthersHaveStaysWhereItIs) {
  RunTorchRanks(2, [](int rank) {
    std::vector<torch::Tensor> weights = {Waves({90}, 1).to(torch::kFloat).requires_grad_(),
                                          Waves({70}, 2).to(torch::kFloat).requires_grad_()};
    // Only one rank has it: all leave the parameter alone.
    const torch::Tensor other = rank == 1 ? weights[0].detach() : torch::Tensor();
    auto optimizer = DistributedOptimizer(SGD(weights, SGDOptions(0.5)), InShards());
    for (int step = 0; step < 3; ++step) {
      BackwardOfAll(weights, rank, step);
      optimizer.step();
      optimizer.zero_grad();
      EXPECT_FALSE(IsCommon(weights[0]));
      EXPECT_TRUE(IsCommon(weights[1]));
      EXPECT_TRUE(!other.defined() || torch::equal(other, weights[0]));
    }
    ExpectEqualOnAllRanks(weights);
  });
}

TEST(CommonParametersTest, AParameterThatMovesOnOneRankAloneIsNoLongerCommon) {
  RunTorchRanks(2, [](int rank) {
    std::vector<torch::Tensor> weights = MixedWeights();
    auto optimizer = DistributedOptimizer(SGD(weights, SGDOptions(0.5)), InShards());
    BackwardOfAll(weights, rank, 0);
    optimizer.step();
    if (rank == 1) weights[0].set_data(weights[0].detach().clone());
    for (int step = 1; step < 4; ++step) {
      optimizer.zero_grad();
      BackwardOfAll(weights, rank, step);
      optimizer.step();
      EXPECT_FALSE(IsCommon(weights[0]));
      EXPECT_TRUE(IsCommon(weights[3]));
      ExpectEqualOnAllRanks(weights);
    }
  });
}

TEST(CommonParametersTest, TwoOptimizersOfTheSameParameters) {
  RunTorchRanks(
      2,
      [](int rank) {
        const auto train = [&](bool common) {
          std::vector<torch::Tensor> weights = MixedWeights();
          auto first = DistributedOptimizer(SGD(weights, SGDOptions(0.5)), InShards(common));
          auto second = DistributedOptimizer(Adam(weights, AdamOptions(0.01)), InShards(common));
          for (int step = 0; step < 4; ++step) {
            BackwardOfAll(weights, rank, step);
            step % 2 == 0 ? first.step() : second.step();
            first.zero_grad();
          }
          return weights;
        };
        ExpectSameTensors(train(true), train(false), "two optimizers");
      },
      habits::Deterministic());
}

// ---- optimizers that are not LibTorch's ----

// Its step gives each parameter other memory, as `p.data = p.data - …` does in Python.
class ReplacingStep : public SGD {
 public:
  using SGD::SGD;
  torch::Tensor step(LossClosure) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (torch::Tensor& parameter : group.params()) {
        if (parameter.grad().defined()) {
          parameter.set_data(parameter.detach() - 0.5 * parameter.grad());
        }
      }
    }
    return {};
  }
};

TEST(CommonParametersTest, AStepThatGivesItsParametersOtherMemory) {
  for (const ShardBy by : {ShardBy::Element, ShardBy::Parameter}) {
    RunTorchRanks(
        2,
        [by](int rank) {
          const auto train = [&](const DistributedOptimizerOptions& options) {
            const std::vector<torch::Tensor> weights = MixedWeights();
            auto optimizer = DistributedOptimizer(ReplacingStep(weights, SGDOptions(0.5)), options);
            for (int step = 0; step < 3; ++step) {
              optimizer.zero_grad();
              BackwardOfAll(weights, rank, step);
              optimizer.step();
            }
            return weights;
          };
          const auto whole = train(DistributedOptimizerOptions());
          ExpectSameTensors(train(InShards().shard_by(by)), whole, "common");
          ExpectSameTensors(train(InShards(false).shard_by(by)), whole, "copies");
        },
        habits::Deterministic());
  }
}

class ThrowingStep : public SGD {
 public:
  using SGD::SGD;
  torch::Tensor step(LossClosure closure) override {
    if (throws) throw std::runtime_error("no step today");
    return SGD::step(std::move(closure));
  }
  bool throws = false;
};

TEST(CommonParametersTest, AStepThatThrowsIsAnErrorOnAllRanksAndTheNextOneGoesOn) {
  RunTorchRanks(2, [](int rank) {
    const std::vector<torch::Tensor> weights = MixedWeights();
    auto optimizer = DistributedOptimizer(ThrowingStep(weights, SGDOptions(0.5)), InShards());
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      BackwardOfAll(weights, rank, step);
      optimizer.throws = step == 1 && rank == 1;
      if (step != 1) {
        optimizer.step();
      } else if (rank == 1) {
        EXPECT_THROW(optimizer.step(), std::runtime_error);
      } else {
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                    HasSubstr("no step today"));
      }
      if (step == 1) broadcast_parameters(weights, 0);
      ExpectEqualOnAllRanks(weights);
    }
    EXPECT_TRUE(IsCommon(weights[0]));
  });
}

TEST(CommonParametersTest, AParameterThatHasLeftTheOptimizerKeepsWhatIsWrittenToIt) {
  RunTorchRanks(
      2,
      [](int rank) {
        const auto train = [&](bool common) {
          std::vector<torch::Tensor> weights = MixedWeights();
          auto optimizer = DistributedOptimizer(SGD(weights, SGDOptions(0.5)), InShards(common));
          for (int step = 0; step < 4; ++step) {
            optimizer.zero_grad();
            BackwardOfAll(weights, rank, step);
            if (step == 2) optimizer.param_groups()[0].params() = {weights[0], weights[2]};
            optimizer.step();
            const torch::NoGradGuard no_grad;
            if (step >= 2)
              for (torch::Tensor& weight : weights) weight.mul_(0.5).add_(rank);
          }
          return weights;
        };
        ExpectSameTensors(train(true), train(false), "left");
      },
      habits::Deterministic());
}

TEST(CommonParametersTest, AParameterWithoutGradientKeepsWhatIsWrittenToIt) {
  RunTorchRanks(
      2,
      [](int rank) {
        const auto train = [&](bool common) {
          std::vector<torch::Tensor> weights = MixedWeights();
          auto optimizer = DistributedOptimizer(SGD(weights, SGDOptions(0.5)), InShards(common));
          for (int step = 0; step < 5; ++step) {
            optimizer.zero_grad();
            weights[3].set_requires_grad(step < 1);
            weights[5].set_requires_grad(step != 0);
            for (const torch::Tensor& weight : weights) {
              if (weight.requires_grad()) BackwardOfAll({weight}, rank, step);
            }
            optimizer.step();
            const torch::NoGradGuard no_grad;
            for (torch::Tensor& weight : weights) weight.add_(rank);
          }
          return weights;
        };
        ExpectSameTensors(train(true), train(false), "frozen");
      },
      habits::Deterministic());
}

TEST(CommonParametersTest, ParametersThatAllLeaveAndComeBack) {
  RunTorchRanks(
      2,
      [](int rank) {
        const auto train = [&](bool common) {
          std::vector<torch::Tensor> weights = MixedWeights();
          const std::vector<torch::Tensor> others = {torch::ones({900}).requires_grad_()};
          const torch::Tensor view = others[0].detach();
          auto optimizer = DistributedOptimizer(SGD(weights, SGDOptions(0.5)), InShards(common));
          for (int step = 0; step < 6; ++step) {
            std::vector<torch::Tensor> now = step / 2 == 1 ? others : weights;
            optimizer.param_groups()[0].params() = now;
            optimizer.zero_grad();
            BackwardOfAll(now, rank, step);
            optimizer.step();
            const torch::NoGradGuard no_grad;
            for (torch::Tensor& weight : weights) weight.add_(rank);
            for (torch::Tensor& weight : now) weight.mul_(0.5);
          }
          return weights;
        };
        ExpectSameTensors(train(true), train(false), "left");
      },
      habits::Deterministic());
}

TEST(CommonParametersTest, AStepInInferenceModeLeavesParametersThatMayBeTrained) {
  RunTorchRanks(2, [](int) {
    const std::vector<torch::Tensor> weights = MixedWeights();
    auto optimizer = DistributedOptimizer(SGD(weights, SGDOptions(0.5)), InShards());
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      for (const torch::Tensor& weight : weights) (weight * weight).sum().backward();
      const c10::InferenceMode guard;
      optimizer.step();
      EXPECT_TRUE(IsCommon(weights[0]));
      EXPECT_FALSE(weights[0].is_inference());
    }
    ExpectEqualOnAllRanks(weights);
  });
}

// Its step changes parameters that it knows from elsewhere, as hooks of a step do in Python.
class ClippingStep : public SGD {
 public:
  ClippingStep(std::vector<torch::Tensor> parameters, SGDOptions options)
      : SGD(parameters, options), parameters_(std::move(parameters)) {}
  torch::Tensor step(LossClosure closure) override {
    torch::Tensor loss = SGD::step(std::move(closure));
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : parameters_) parameter.clamp_(-0.1, 0.1);
    return loss;
  }

 private:
  std::vector<torch::Tensor> parameters_;
};

TEST(CommonParametersTest, AStepThatWritesToTheParametersThatAProgramSees) {
  for (const ShardBy by : {ShardBy::Element, ShardBy::Parameter}) {
    RunTorchRanks(
        2,
        [by](int rank) {
          const auto train = [&](const DistributedOptimizerOptions& options) {
            const std::vector<torch::Tensor> weights = MixedWeights();
            auto optimizer = DistributedOptimizer(ClippingStep(weights, SGDOptions(0.5)), options);
            for (int step = 0; step < 3; ++step) {
              optimizer.zero_grad();
              BackwardOfAll(weights, rank, step);
              optimizer.step();
              ExpectEqualOnAllRanks(weights);
            }
            return weights;
          };
          const auto whole = train(DistributedOptimizerOptions());
          ExpectSameTensors(train(InShards().shard_by(by)), whole, "common");
          ExpectSameTensors(train(InShards(false).shard_by(by)), whole, "copies");
        },
        habits::Deterministic());
  }
}

TEST(CommonParametersTest, ParametersInMemoryOfTheProgramStayThere) {
  RunTorchRanks(2, [](int rank) {
    std::vector<float> memory(4000, 1.0F);
    std::vector<torch::Tensor> weights = {torch::from_blob(memory.data(), {4000}).requires_grad_(),
                                          Waves({70}, 2).clone().requires_grad_()};
    auto optimizer = DistributedOptimizer(SGD(weights, SGDOptions(0.5)), InShards());
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      BackwardOfAll(weights, rank, step);
      optimizer.step();
      EXPECT_EQ(weights[0].const_data_ptr(), memory.data());
      EXPECT_TRUE(IsCommon(weights[1]));
    }
  });
}

TEST(CommonParametersTest, ANewOptimizerTakesThemOver) {
  RunTorchRanks(2, [](int rank) {
    const std::vector<torch::Tensor> weights = MixedWeights();
    const void* at = nullptr;
    for (int i = 0; i < 3; ++i) {
      auto optimizer = DistributedOptimizer(SGD(weights, SGDOptions(0.5)), InShards());
      BackwardOfAll(weights, rank, i);
      optimizer.step();
      EXPECT_TRUE(IsCommon(weights[0]));
      EXPECT_NE(weights[0].const_data_ptr(), at);
      at = weights[0].const_data_ptr();
      optimizer.zero_grad();
    }
    ExpectEqualOnAllRanks(weights);
  });
}

TEST(CommonParametersTest, AnotherListOfGradientsIsAnErrorOnAllRanks) {
  RunTorchRanks(2, [](int rank) {
    const std::vector<torch::Tensor> weights = MixedWeights();
    auto optimizer = DistributedOptimizer(SGD(weights, SGDOptions(0.5)), InShards());
    BackwardOfAll(weights, rank, 0);
    const auto scope = optimizer.skip_synchronize();
    weights[0].mutable_grad().reset();
    optimizer.step();
    if (rank == 1) weights[3].mutable_grad().reset();
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { optimizer.step(); }),
                HasSubstr("gradients of different parameters"));
  });
}

TEST(CommonParametersTest, RanksOnSeveralHostsHaveCopies) {
  RunTorchRanks(2,
                [](int rank) {
                  const std::vector<torch::Tensor> weights = MixedWeights();
                  auto optimizer = DistributedOptimizer(SGD(weights, SGDOptions(0.5)), InShards());
                  BackwardOfAll(weights, rank, 0);
                  optimizer.step();
                  EXPECT_FALSE(IsCommon(weights[0]));
                  ExpectEqualOnAllRanks(weights);
                },
                {}, {0, 1});
}

}  // namespace
}  // namespace sirtaki::tests
