// Sparse gradients, as those of an embedding.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sirtaki/collectives.h"
#include "sirtaki/data_parallel.h"
#include "sirtaki/grad_scaler.h"
#include "sirtaki/optimizer.h"
#include "tests/torch/gradients/sparse_training.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Options = DistributedOptimizerOptions;
using Tensors = std::vector<torch::Tensor>;

SGD MakeSgd(Tensors parameters) { return SGD(std::move(parameters), SGDOptions(0.1)); }

template <class Make>
void ExpectFollowsOneProcess(const Make& make, const Options& options, bool one_is_sparse) {
  for (const int size : {1, 2, 3, 4}) {
    auto lone = MakeTable(one_is_sparse);
    auto alone = make(lone->parameters());
    for (int step = 0; step < 5; ++step) {
      alone.zero_grad();
      JoinedTableLoss(lone, step, size).backward();
      alone.step();
    }
    RunTorchRanks(size, [&](int rank) {
      auto table = MakeTable(true);
      auto optimizer =
          DistributedOptimizer(make(table->parameters()), table->named_parameters(), options);
      for (int step = 0; step < 5; ++step) {
        optimizer.zero_grad();
        TableLoss(table, RowsOfRank(step, rank), rank).backward();
        optimizer.step();
        EXPECT_EQ(table->weight.grad().is_sparse(), !options.sparse_as_dense());
      }
      EXPECT_LT((table->weight - lone->weight).abs().max().item<double>(), 1e-13) << size;
      const auto of_root = broadcast(table->weight.detach(), 0);
      EXPECT_TRUE(torch::equal(of_root, table->weight));
    });
  }
}

TEST(SparseGradientTest, OptimizersThatTakeThemFollowOneProcess) {
  using namespace torch::optim;
  ExpectFollowsOneProcess(MakeSgd, {}, true);
  ExpectFollowsOneProcess(MakeSgd, {}, false);
  ExpectFollowsOneProcess(MakeSgd, Options().gradient_predivide_factor(2), true);
  ExpectFollowsOneProcess([](Tensors p) { return Adagrad(std::move(p), AdagradOptions(0.1)); }, {},
                          true);
  ExpectFollowsOneProcess(
      [](Tensors p) { return SGD(std::move(p), SGDOptions(0.1).momentum(0.9)); }, {}, true);
}

TEST(SparseGradientTest, AsDenseOnesTheyAreForEveryOptimizer) {
  using namespace torch::optim;
  const auto options = Options().sparse_as_dense(true);
  ExpectFollowsOneProcess(MakeSgd, options, false);
  ExpectFollowsOneProcess([](Tensors p) { return Adam(std::move(p), AdamOptions(0.1)); }, options,
                          false);
}

TEST(SparseGradientTest, AreAddedUpAndCoalesced) {
  RunTorchRanks(2, [](int rank) {
    auto table = MakeTable(true);
    auto optimizer = DistributedOptimizer(MakeSgd(table->parameters()), table->named_parameters(),
                                          Options().op(ReduceOp::Sum));
    table(torch::tensor({rank, 2, 2})).sum().backward();
    optimizer.synchronize();
    const auto gradient = table->weight.grad();
    EXPECT_TRUE(gradient.is_coalesced());
    EXPECT_TRUE(torch::equal(gradient.indices(), torch::tensor({{0, 1, 2}})));
    EXPECT_TRUE(torch::equal(gradient.values().select(1, 0),
                             torch::tensor({1.0, 1.0, 4.0}, torch::kDouble)));
  });
}

TEST(SparseGradientTest, ARankWithoutOneAddsNothing) {
  const std::vector<std::pair<int, Average>> kWithAndAverage = {
      {0, Average::Backward}, {1, Average::Backward}, {2, Average::Backward},
      {0, Average::Step},     {1, Average::Step},     {2, Average::Step}};
  for (const auto& [with, average] : kWithAndAverage) {
    RunTorchRanks(3, [with = with, average = average](int rank) {
      auto table = MakeTable(true);
      const auto before = table->weight.detach().clone();
      auto optimizer =
          DistributedOptimizer(SGD(table->parameters(), SGDOptions(1.0)), table->named_parameters(),
                               Options().average_at(average));
      // In the first step the others cannot know that it is sparse; then nobody has one; then
      // another rank.
      for (const int who : {with, -1, (with + 1) % 3}) {
        optimizer.zero_grad();
        if (rank == who) table(torch::tensor({4})).sum().backward();
        if (rank != who && average == Average::Backward) optimizer.synchronize();
        optimizer.step();
        EXPECT_EQ(table->weight.grad().defined(), who >= 0);
      }
      auto expected = before.clone();
      expected[4] -= 2.0 / 3;
      EXPECT_TRUE(torch::allclose(table->weight, expected, 1e-14, 1e-14));
    });
  }
}

TEST(SparseGradientTest, SparseHereAndDenseThereIsThrownOnEveryRank) {
  for (const Average average : {Average::Backward, Average::Step}) {
    RunTorchRanks(3, [average](int rank) {
      auto weight = torch::zeros({4, 2}, torch::requires_grad());
      const NamedTensors names = {{"w", weight}};
      auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1.0)), names,
                                            Options().average_at(average));
      const auto sparse = [&](double factor) {
        (torch::embedding(weight, torch::tensor({1}), -1, false, /*sparse=*/true) * factor)
            .sum()
            .backward();
      };
      for (int time = 0; time < 2; ++time) {
        optimizer.zero_grad();
        const auto text = ErrorOf(ErrorCode::Mismatch, [&] {
          if (rank == 0) weight.sum().backward();
          if (rank == 1) optimizer.synchronize();
          if (rank == 2) sparse(1);
          optimizer.step();
        });
        EXPECT_THAT(text, AllOf(HasSubstr("\"w\" is sparse on rank 2 and dense on rank 0"),
                                HasSubstr("sparse_as_dense")));
      }
      EXPECT_EQ(weight.abs().sum().item<float>(), 0);
      // All have dense ones, then some sparse ones, then some dense ones: each time all find the way.
      for (const int form : {0, 1, 0, 1}) {
        optimizer.zero_grad();
        if (rank > 0 && form == 0) weight.sum().backward();
        if (rank > 0 && form == 1) sparse(rank);
        if (rank == 0) optimizer.synchronize();
        optimizer.step();
        EXPECT_EQ(weight.grad().is_sparse(), form == 1);
      }
      EXPECT_FLOAT_EQ(weight[1][0].item<float>(), -2 * (2.0f / 3 + 1));
      EXPECT_FLOAT_EQ(weight[0][0].item<float>(), -2 * (2.0f / 3));
    });
  }
}

TEST(SparseGradientTest, AMismatchOfSomethingElseStays) {
  RunTorchRanks(2, [](int rank) {
    auto weight = torch::zeros({4, 2}, torch::requires_grad());
    const NamedTensors names = {{"w", weight}};
    auto optimizer = DistributedOptimizer(SGD({weight}, SGDOptions(1.0)), names);
    // Two sparse dimensions on one rank, one on the other.
    weight.mutable_grad() = torch::ones({4, 2}).to_sparse(rank + 1);
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { optimizer.step(); }),
                HasSubstr("[*, 2] on rank 1"));
    weight.mutable_grad() = torch::ones({4, 2}).to_sparse(2);
    optimizer.step();
    EXPECT_EQ(weight.sum().item<float>(), -8);
  });
}

TEST(SparseGradientTest, AccumulateBeforeTheyAreReduced) {
  for (const bool as_dense : {false, true}) {
    RunTorchRanks(2, [as_dense](int rank) {
      auto table = MakeTable(true);
      auto lone = MakeTable(false);
      auto optimizer =
          DistributedOptimizer(MakeSgd(table->parameters()), table->named_parameters(),
                               Options().backward_passes_per_step(2).sparse_as_dense(as_dense));
      auto alone = MakeSgd(lone->parameters());
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        alone.zero_grad();
        for (int pass = 0; pass < 2; ++pass) {
          TableLoss(table, RowsOfRank(step + pass, rank), rank).backward();
          JoinedTableLoss(lone, step + pass, 2).backward();
        }
        optimizer.step();
        alone.step();
      }
      {
        auto hold = optimizer.no_sync();
        TableLoss(table, RowsOfRank(7, rank), rank).backward();
      }
      JoinedTableLoss(lone, 7, 2).backward();
      // What is left of the step before is on both ranks and counts once.
      optimizer.step();
      alone.step();
      EXPECT_LT((table->weight - lone->weight).abs().max().item<double>(), 1e-12);
    });
  }
}

TEST(SparseGradientTest, AreClippedByTheirNorm) {
  RunTorchRanks(2, [](int rank) {
    auto table = MakeTable(true);
    auto optimizer = DistributedOptimizer(MakeSgd(table->parameters()), table->named_parameters());
    TableLoss(table, RowsOfRank(0, rank), rank).backward();
    auto lone = MakeTable(false);
    auto alone = MakeSgd(lone->parameters());
    JoinedTableLoss(lone, 0, 2).backward();
    EXPECT_NEAR(clip_grad_norm_(optimizer, 0.25), clip_grad_norm_(alone, 0.25), 1e-12);
    EXPECT_LT((table->weight.grad().to_dense() - lone->weight.grad()).abs().max().item<double>(),
              1e-13);
    // The gradient of one process is not coalesced.
    auto plain = MakeTable(true);
    auto sgd = MakeSgd(plain->parameters());
    JoinedTableLoss(plain, 0, 2).backward();
    clip_grad_norm_(sgd, 0.25);
    EXPECT_LT((plain->weight.grad().to_dense() - lone->weight.grad()).abs().max().item<double>(),
              1e-13);
  });
}

TEST(SparseGradientTest, AreUnscaled) {
  RunTorchRanks(2, [](int rank) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    auto optimizer =
        DistributedOptimizer(SGD(table->parameters(), SGDOptions(1.0)), table->named_parameters());
    GradScaler scaler(GradScalerOptions().init_scale(8));
    for (const double factor : {1.0, std::numeric_limits<double>::infinity()}) {
      const auto before = table->weight.detach().clone();
      optimizer.zero_grad();
      scaler.scale(table(torch::tensor({1, 1, rank * 2})).sum() * (rank == 1 ? factor : 1.0))
          .backward();
      EXPECT_EQ(scaler.step(optimizer), factor == 1);
      scaler.update();
      auto expected = before;
      if (factor == 1) {
        expected[1] -= 2;
        expected[0] -= 0.5;
        expected[2] -= 0.5;
      }
      EXPECT_TRUE(torch::allclose(table->weight, expected));
    }
  });
}

TEST(SparseGradientTest, AHookIsNotForThem) {
  RunTorchRanks(2, [](int) {
    for (const bool as_dense : {false, true}) {
      auto table = MakeTable(true);
      const CommunicationHook hook = [](const GradientBucket& bucket) {
        return [buffer = bucket.buffer] { return buffer * 2; };
      };
      auto optimizer = DistributedOptimizer(MakeSgd(table->parameters()), table->named_parameters(),
                                            Options().hook(hook).sparse_as_dense(as_dense));
      const auto backward = [&] { table(torch::tensor({1})).sum().backward(); };
      if (as_dense) {
        backward();
        optimizer.synchronize();
        EXPECT_EQ(table->weight.grad()[1][0].item<double>(), 2);
        continue;
      }
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                          [&] {
                            backward();
                            optimizer.step();
                          }),
                  AllOf(HasSubstr("weight"), HasSubstr("dense")));
    }
  });
}

TEST(SparseGradientTest, OfAModuleBecomeDenseWithOneRankToo) {
  for (const int size : {1, 2}) {
    RunTorchRanks(size, [size](int rank) {
      auto table = MakeTable(true);
      DistributedDataParallel model(
          table, DistributedDataParallelOptions().gradients(Options().sparse_as_dense(true)));
      model.forward(torch::tensor({rank})).sum().backward();
      ASSERT_FALSE(table->weight.grad().is_sparse());
      EXPECT_EQ(table->weight.grad()[0][0].item<double>(), 1.0 / size);
    });
  }
}

TEST(SparseGradientTest, OfAModuleThatAverages) {
  RunTorchRanks(3, [](int rank) {
    auto table = MakeTable(true);
    DistributedDataParallel model(table);
    model.forward(torch::tensor({rank})).sum().backward();
    const auto gradient = table->weight.grad();
    ASSERT_TRUE(gradient.is_sparse());
    EXPECT_TRUE(torch::allclose(gradient.to_dense().select(1, 0).slice(0, 0, 3),
                                torch::full({3}, 1.0 / 3, torch::kDouble)));
  });
}

TEST(SparseGradientTest, StayInTheirProcessSet) {
  RunTorchRanks(4, [](int rank) {
    const ProcessSet low = add_process_set({0, 1});
    const ProcessSet high = add_process_set({2, 3});
    auto table = MakeTable(true);
    auto optimizer = DistributedOptimizer(MakeSgd(table->parameters()), table->named_parameters(),
                                          Options().process_set(rank < 2 ? low : high));
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      // The first step of ranks 1 and 3 is without a gradient.
      if (step > 0 || rank % 2 == 0) table(torch::tensor({rank})).sum().backward();
      optimizer.synchronize();
      const auto column = table->weight.grad().to_dense().select(1, 0);
      const int first = rank < 2 ? 0 : 2;
      EXPECT_EQ(column[first].item<double>(), 0.5);
      EXPECT_EQ(column[first + 1].item<double>(), step == 0 ? 0 : 0.5);
      EXPECT_EQ(column.sum().item<double>(), step == 0 ? 0.5 : 1);
    }
  });
}

}  // namespace
}  // namespace sirtaki::tests
