// RANKS: 2 3 4
// Process sets, sparse gradients and Adasum of optimizers, as a program on mpirun's ranks uses
// them.
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <utility>
#include <vector>

#include "tests/torch/gradients/adasum_training.h"
#include "tests/torch/gradients/sparse_training.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;
using Options = DistributedOptimizerOptions;
using Tensors = std::vector<torch::Tensor>;

class PartsTest : public testing::Test {
 protected:
  void SetUp() override { init(); }
  void TearDown() override { shutdown(); }
};

SGD MakeSgd(Tensors parameters) {
  return SGD(std::move(parameters), SGDOptions(0.1).momentum(0.9));
}

// The last rank alone, the others together, all at the same time.
TEST_F(PartsTest, OptimizersOfDisjointSets) {
  std::vector<int> others;
  for (int r = 0; r + 1 < size(); ++r) others.push_back(r);
  const ProcessSet low = add_process_set(others);
  const ProcessSet last = add_process_set({size() - 1});
  const ProcessSet& mine = last.included() ? last : low;
  const auto expected = TrainAlone(MakeSgd, 10, mine.size());
  SmallNet net;
  broadcast_parameters(net, mine.ranks().front(), mine);
  auto optimizer = DistributedOptimizer(MakeSgd(net.parameters()), net.named_parameters(),
                                        Options().process_set(mine));
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    Loss(net, BatchOfRank(step, mine.rank())).backward();
    optimizer.step();
  }
  EXPECT_LT(Distance(net.parameters(), expected), 1e-13);
  check_parameters(net, mine);
  EXPECT_EQ(metric_average(1, "one", mine), 1);
}

TEST_F(PartsTest, SparseGradientsFollowOneProcess) {
  const auto make = [](Tensors p) { return SGD(std::move(p), SGDOptions(0.1)); };
  auto lone = MakeTable(true);
  auto alone = make(lone->parameters());
  auto table = MakeTable(true);
  auto optimizer = DistributedOptimizer(make(table->parameters()), table->named_parameters());
  for (int step = 0; step < 5; ++step) {
    alone.zero_grad();
    optimizer.zero_grad();
    // Without rank 0's in the first step.
    auto sum = torch::zeros({}, torch::kDouble);
    for (int r = step == 0 ? 1 : 0; r < size(); ++r) {
      sum = sum + TableLoss(lone, RowsOfRank(step, r), r);
    }
    (sum / size()).backward();
    if (step > 0 || rank() > 0) TableLoss(table, RowsOfRank(step, rank()), rank()).backward();
    if (step == 0 && rank() == 0) optimizer.synchronize();
    alone.step();
    optimizer.step();
  }
  EXPECT_LT((table->weight - lone->weight).abs().max().item<double>(), 1e-13);
  check_parameters(*table);
}

TEST_F(PartsTest, AdasumFollowsTheNaiveProcedure) {
  const auto expected = TrainByAdasum(MakeSgd, 6, size());
  SmallNet net;
  auto optimizer = DistributedOptimizer(MakeSgd(net.parameters()), net.named_parameters(),
                                        Options().op(ReduceOp::Adasum));
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    Loss(net, BatchOfRank(step, rank())).backward();
    optimizer.step();
    check_parameters(net);
  }
  EXPECT_LT(Distance(net.parameters(), expected), 1e-12);
}

}  // namespace
}  // namespace sirtaki::tests
