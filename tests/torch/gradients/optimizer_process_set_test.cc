// Training on a part of the ranks: optimizers, modules and what goes with them, on process sets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sirtaki/broadcast.h"
#include "sirtaki/check_parameters.h"
#include "sirtaki/collectives.h"
#include "sirtaki/data_parallel.h"
#include "sirtaki/grad_scaler.h"
#include "sirtaki/metrics.h"
#include "sirtaki/objects.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/sync_batch_norm.h"
#include "tests/torch/batch_norm/norm_net.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Options = DistributedOptimizerOptions;

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// Ranks 0 and 1, or the others, whichever this rank is in. Collective over all.
ProcessSet HalfOf(int rank, int size) {
  std::vector<int> high;
  for (int r = 2; r < size; ++r) high.push_back(r);
  const ProcessSet first = add_process_set({0, 1});
  const ProcessSet second = add_process_set(high);
  return rank < 2 ? first : second;
}

DistributedOptimizer<SGD> WrapInSet(const NamedTensors& names, const Options& options = {}) {
  std::vector<torch::Tensor> parameters;
  for (const auto& [name, tensor] : names) parameters.push_back(tensor);
  return DistributedOptimizer<SGD>(SGD(std::move(parameters), SGDOptions(1.0)), names, options);
}

torch::Tensor ZerosOf(std::int64_t count) { return torch::zeros({count}, torch::requires_grad()); }

float FirstOf(const torch::Tensor& weight) { return weight.detach().view(-1)[0].item<float>(); }

TEST(OptimizerSetTest, TwoHalvesTrainApart) {
  const auto make = [](std::vector<torch::Tensor> p) {
    return torch::optim::Adam(std::move(p), torch::optim::AdamOptions(0.01));
  };
  const auto of_two = TrainAlone(make, 8, 2);
  RunTorchRanks(5, [&](int rank) {
    const ProcessSet half = HalfOf(rank, 5);
    // Two in one half, one in the other: they are counted by set.
    SmallNet other;
    if (rank < 2) {
      WrapInSet(other.named_parameters().pairs(), Options().process_set(half));
    }
    SmallNet net;
    auto optimizer = DistributedOptimizer(make(net.parameters()), net.named_parameters(),
                                          Options().process_set(half));
    // The others have the same batches as ranks 0 and 1, rank 4 those of rank 1 again.
    const int share = rank < 2 ? rank : std::min(rank - 2, 1);
    for (int step = 0; step < 8; ++step) {
      optimizer.zero_grad();
      Loss(net, BatchOfRank(step, share)).backward();
      optimizer.step();
    }
    if (rank < 2) {
      EXPECT_LT(Distance(net.parameters(), of_two), 1e-12);
    } else {
      EXPECT_GT(Distance(net.parameters(), of_two), 1e-5);
    }
    check_parameters(net, half);
    ErrorOf(ErrorCode::Mismatch, [&] { check_parameters(net); });
  });
}

TEST(OptimizerSetTest, AverageIsOverTheSet) {
  RunTorchRanks(4, [](int rank) {
    const ProcessSet set = add_process_set({0, 2, 3});
    if (!set.included()) return;
    for (const double factor : {1.0, 3.0}) {
      auto weight = ZerosOf(2);
      auto optimizer = WrapInSet({{"weight", weight}},
                                 Options().process_set(set).gradient_predivide_factor(factor));
      (weight.sum() * (rank + 1)).backward();
      optimizer.step();
      EXPECT_FLOAT_EQ(FirstOf(weight), -(1 + 3 + 4) / 3.0f);
    }
    auto weight = ZerosOf(2);
    auto optimizer = WrapInSet({{"weight", weight}}, Options().process_set(set).op(ReduceOp::Sum));
    (weight.sum() * (rank + 1)).backward();
    optimizer.step();
    EXPECT_EQ(FirstOf(weight), -8);
  });
}

// Pairs share one layer, all share the other: model parallel inside data parallel.
TEST(OptimizerSetTest, ParametersOfAModelAreSplitOverSets) {
  RunTorchRanks(4, [](int rank) {
    const ProcessSet half = HalfOf(rank, 4);
    auto own = ZerosOf(1);
    auto shared = ZerosOf(3);
    auto of_half = WrapInSet({{"weight", own}}, Options().process_set(half));
    auto of_all = WrapInSet({{"weight", shared}});
    for (int step = 1; step <= 3; ++step) {
      of_half.zero_grad();
      of_all.zero_grad();
      ((own.sum() + shared.sum()) * (rank + 1)).backward();
      of_half.step();
      of_all.step();
      EXPECT_FLOAT_EQ(FirstOf(own), -static_cast<float>(step) * (rank < 2 ? 1.5f : 3.5f));
      EXPECT_FLOAT_EQ(FirstOf(shared), -static_cast<float>(step) * 2.5f);
    }
  });
}

TEST(OptimizerSetTest, RanksOutsideAreToldAtOnce) {
  RunTorchRanks(3, [](int) {
    const ProcessSet set = add_process_set({0, 2});
    if (set.included()) return;
    auto net = std::make_shared<SmallNet>();
    const auto options = Options().process_set(set);
    const auto text = ErrorOf(ErrorCode::InvalidArgument,
                              [&] { WrapInSet(net->named_parameters().pairs(), options); });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 1 is not in"), HasSubstr("0, 2")));
    const std::vector<std::function<void()>> calls = {
        [&] {
          DistributedDataParallel<SmallNet>(net,
                                            DistributedDataParallelOptions().gradients(options));
        },
        [&] { broadcast_parameters(*net, 0, set); },
        [&] { broadcast_object("text", 0, "", set); },
        [&] { allgather_object("text", "", set); },
        [&] { metric_average(1.0, "", set); },
        [&] { check_parameters(*net, set); },
    };
    for (const auto& call : calls) {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, call), HasSubstr("rank 1 is not in"));
    }
  });
}

TEST(OptimizerSetTest, AParameterBelongsToOneSet) {
  RunTorchRanks(2, [](int) {
    const ProcessSet set = add_process_set({0, 1});
    auto weight = ZerosOf(2);
    auto optimizer = WrapInSet({{"weight", weight}});
    const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] {
      WrapInSet({{"weight", weight}}, Options().process_set(set));
    });
    EXPECT_THAT(text, HasSubstr("in process set " + std::to_string(set.id())));
  });
}

TEST(OptimizerSetTest, DifferencesNameRanksOfTheJob) {
  RunTorchRanks(4, [](int rank) {
    const ProcessSet set = add_process_set({1, 3});
    if (!set.included()) return;
    auto weight = ZerosOf(rank);
    auto text = ErrorOf(ErrorCode::Mismatch, [&] {
      WrapInSet({{"weight", weight}}, Options().process_set(set));
    });
    EXPECT_THAT(text, AllOf(HasSubstr("[1] on rank 1"), HasSubstr("[3] on rank 3")));
    text = ErrorOf(ErrorCode::Mismatch, [&] {
      check_parameters({{"w", torch::full({2}, rank)}}, set);
    });
    EXPECT_THAT(text, AllOf(HasSubstr("on rank 1"), HasSubstr("on rank 3")));
    text = ErrorOf(ErrorCode::InvalidArgument, [&] {
      WrapInSet({{"weight", ZerosOf(1)}},
                Options().process_set(set).backward_passes_per_step(rank == 3 ? 0 : 1));
    });
    EXPECT_THAT(text, HasSubstr("on rank 3"));
  });
}

TEST(OptimizerSetTest, ARemovedSetIsNamedByTheStep) {
  RunTorchRanks(2, [](int) {
    const ProcessSet set = add_process_set({0, 1});
    auto weight = ZerosOf(2);
    auto optimizer = WrapInSet({{"weight", weight}}, Options().process_set(set));
    remove_process_set(set);
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          optimizer.zero_grad();
                          weight.sum().backward();
                          optimizer.step();
                        }),
                HasSubstr("process set"));
  });
}

TEST(OptimizerSetTest, ASetOfOneRankTrainsAlone) {
  RunTorchRanks(2, [](int rank) {
    const ProcessSet last = add_process_set({1});
    if (rank == 0) return;
    auto weight = ZerosOf(2);
    auto optimizer = WrapInSet({{"weight", weight}}, Options().process_set(last));
    (weight.sum() * 3).backward();
    optimizer.step();
    EXPECT_EQ(FirstOf(weight), -3);
  });
}

TEST(OptimizerSetTest, TheLossOfAClosureIsTheSets) {
  RunTorchRanks(3, [](int rank) {
    const ProcessSet set = add_process_set({0, 2});
    if (!set.included()) return;
    auto weight = ZerosOf(1);
    auto optimizer = WrapInSet({{"weight", weight}}, Options().process_set(set));
    const auto loss = optimizer.step([&] {
      optimizer.zero_grad();
      auto value = weight.sum() * (rank + 1) + rank;
      value.backward();
      return value;
    });
    EXPECT_EQ(loss.item<float>(), 1);
    EXPECT_EQ(FirstOf(weight), -2);
  });
}

// ---- what goes with them ----

TEST(OptimizerSetTest, AModuleIsOfTheSetAltogether) {
  RunTorchRanks(4, [](int rank) {
    const ProcessSet set = add_process_set({1, 2});
    if (!set.included()) return;
    torch::nn::Sequential net(torch::nn::Linear(1, 1), torch::nn::BatchNorm1d(1));
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.fill_(rank);
    }
    auto options = DistributedDataParallelOptions().gradients(Options().process_set(set));
    DistributedDataParallel model(net, options);
    EXPECT_EQ(net->parameters()[0].item<float>(), 1) << "of the lowest rank";
    net->buffers()[0].fill_(rank);
    model.forward(torch::tensor({{1.0f}, {2.0f}}) * rank).pow(2).sum().backward();
    // The buffer was rank 1's before this batch.
    EXPECT_FLOAT_EQ(net->buffers()[0].item<float>(),
                    0.9f + 0.1f * (1.5f * static_cast<float>(rank) + 1));
    std::vector<std::pair<std::string, torch::Tensor>> gradients;
    for (const auto& item : net->named_parameters()) {
      gradients.emplace_back(item.key(), item.value().grad());
    }
    check_parameters(gradients, set);
  });
}

TEST(OptimizerSetTest, RootsAreRanksOfTheJob) {
  RunTorchRanks(4, [](int rank) {
    const ProcessSet half = HalfOf(rank, 4);
    SmallNet net;
    SGD sgd(net.parameters(), SGDOptions(0.1).momentum(0.9));
    Loss(net, BatchOfRank(0, rank)).backward();
    sgd.step();
    const int root = rank < 2 ? 1 : 2;
    broadcast_parameters(net, root, half);
    broadcast_optimizer_state(sgd, root, half);
    check_parameters(net, half);
    SmallNet lone;
    SGD alone(lone.parameters(), SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 2; ++step) {
      alone.zero_grad();
      Loss(lone, BatchOfRank(step, root)).backward();
      alone.step();
    }
    sgd.zero_grad();
    Loss(net, BatchOfRank(1, root)).backward();
    sgd.step();
    EXPECT_EQ(Distance(net.parameters(), lone.parameters()), 0);
    const auto text =
        ErrorOf(ErrorCode::InvalidArgument, [&] { broadcast_parameters(net, 3 - root, half); });
    EXPECT_THAT(text, AllOf(HasSubstr("root rank " + std::to_string(3 - root)),
                            HasSubstr(rank < 2 ? "ranks 0-1" : "ranks 2-3")));
  });
}

TEST(OptimizerSetTest, ObjectsAndMetricsStayInTheSet) {
  RunTorchRanks(4, [](int rank) {
    const ProcessSet half = HalfOf(rank, 4);
    const std::string mine(static_cast<std::size_t>(rank), 'x');
    for (const std::string& name : {std::string(), std::string("name")}) {
      const auto all = allgather_object(mine, name, half);
      EXPECT_THAT(all, rank < 2 ? ElementsAre("", "x") : ElementsAre("xx", "xxx"));
      EXPECT_EQ(broadcast_object(mine, rank < 2 ? 1 : 3, name, half), rank < 2 ? "x" : "xxx");
      EXPECT_EQ(broadcast_object(torch::full({5000}, rank), rank < 2 ? 0 : 2, name, half)
                    .sum()
                    .item<std::int64_t>(),
                rank < 2 ? 0 : 10000);
      const auto tensors = allgather_object(torch::full({2}, rank), name, half);
      EXPECT_EQ(tensors[1][0].item<std::int64_t>(), rank < 2 ? 1 : 3);
      EXPECT_EQ(metric_average(rank, name, half), rank < 2 ? 0.5 : 2.5);
      EXPECT_EQ(metric_average(rank, rank < 2 ? rank : 1, name, half), rank < 2 ? 1 : 2.5);
    }
  });
}

TEST(OptimizerSetTest, ClippingIsOfTheSet) {
  RunTorchRanks(4, [](int rank) {
    const ProcessSet half = HalfOf(rank, 4);
    auto weight = ZerosOf(4);
    auto optimizer = WrapInSet({{"weight", weight}}, Options().process_set(half));
    (weight.sum() * (rank + 1)).backward();
    EXPECT_DOUBLE_EQ(clip_grad_norm_(optimizer, 1.0), rank < 2 ? 3 : 7);
    optimizer.step();
    EXPECT_NEAR(FirstOf(weight), -0.5, 1e-6);
  });
}

TEST(OptimizerSetTest, AStepIsSkippedByTheSetThatMetInfinity) {
  RunTorchRanks(4, [](int rank) {
    const ProcessSet half = HalfOf(rank, 4);
    for (const bool told : {false, true}) {
      auto weight = ZerosOf(2);
      SGD plain({weight}, SGDOptions(1.0));
      auto optimizer = WrapInSet({{"weight", weight}}, Options().process_set(half));
      auto options = GradScalerOptions().init_scale(8);
      if (told) options.process_set(half);
      GradScaler scaler(options);
      scaler.scale(weight.sum() * (rank == 3 ? kNoLimit : 1.0)).backward();
      if (told) optimizer.synchronize();
      EXPECT_EQ(told ? scaler.step(plain) : scaler.step(optimizer), rank < 2);
      scaler.update();
      EXPECT_EQ(FirstOf(weight), rank < 2 ? -1 : 0);
      EXPECT_EQ(scaler.get_scale(), rank < 2 ? 8 : 4);
    }
  });
}

TEST(OptimizerSetTest, BatchNormJoinsTheBatchesOfTheSet) {
  const auto of_two = TrainNormNetAlone(3, 2);
  RunTorchRanks(4, [&](int rank) {
    const ProcessSet half = HalfOf(rank, 4);
    auto net = MakeNormNet(SyncBatchNorm(4, half), SyncBatchNorm(3, half));
    DistributedOptimizer<SGD> optimizer(SGD(net->parameters(), SGDOptions(0.1).momentum(0.9)),
                                        net->named_parameters(), Options().process_set(half));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      NormLoss(net, ImagesOfRank(step, rank % 2)).backward();
      optimizer.step();
    }
    auto tensors = net->parameters();
    for (const auto& buffer : net->buffers()) tensors.push_back(buffer.to(torch::kDouble));
    EXPECT_LT(Distance(tensors, of_two), 1e-11);
  });
}

}  // namespace
}  // namespace sirtaki::tests
