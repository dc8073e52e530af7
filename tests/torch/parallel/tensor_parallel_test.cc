#include "sirtaki/tensor_parallel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "sirtaki/broadcast.h"
#include "sirtaki/checkpoint.h"
#include "sirtaki/mesh.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/session.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(TensorParallelRefusalTest, OptionsThatDifferAreToldToAllRanks) {
  RunTorchRanks(3, [](int rank) {
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          ColumnParallelLinear layer(
                              ColumnParallelLinearOptions(rank == 1 ? 5 : 4, 6).name("expand"));
                        }),
                AllOf(HasSubstr("ColumnParallelLinear \"expand\" with in_features 5 on rank 1"),
                      HasSubstr("in_features 4 on ranks 0, 2")));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          if (rank == 0) {
                            RowParallelLinear layer(RowParallelLinearOptions(6, 4));
                          } else {
                            ColumnParallelLinear layer(ColumnParallelLinearOptions(6, 4));
                          }
                        }),
                AllOf(HasSubstr("RowParallelLinear with in_features 6 on rank 0"),
                      HasSubstr("ColumnParallelLinear with out_features 4 on ranks 1-2")));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          ParallelCrossEntropy loss(ParallelCrossEntropyOptions(6).label_smoothing(
                              rank == 2 ? 0.1 : 0.2));
                        }),
                HasSubstr("label_smoothing"));
  });
}

TEST(TensorParallelRefusalTest, SizesThatCannotBeSharedAreRefusedWithSizesAndRanks) {
  RunTorchRanks(3, [](int) {
    EXPECT_THAT(
        ErrorOf(ErrorCode::InvalidArgument,
                [] { RowParallelLinear layer(RowParallelLinearOptions(2, 8).name("out")); }),
        HasSubstr("RowParallelLinear \"out\": in_features is 2, which 3 ranks cannot share"));
    ErrorOf(ErrorCode::InvalidArgument,
            [] { ParallelEmbedding layer(ParallelEmbeddingOptions(9, 2).padding_idx(9)); });
    ErrorOf(ErrorCode::InvalidArgument,
            [] { ParallelCrossEntropy loss(ParallelCrossEntropyOptions(9).label_smoothing(2)); });
  });
}

TEST(TensorParallelRefusalTest, InputsThatDifferAreToldToAllRanks) {
  RunTorchRanks(2, [](int rank) {
    RowParallelLinear row(RowParallelLinearOptions(4, 3).name("contract"));
    EXPECT_THAT(
        ErrorOf(ErrorCode::Mismatch,
                [&] {
                  row(torch::ones({2 + rank, 2}));
                }),
        AllOf(HasSubstr("RowParallelLinear contract"), HasSubstr("[2, 3]"), HasSubstr("[3, 3]")));
    // A rank whose own input is wrong says so to the other, which would wait.
    ErrorOf(ErrorCode::InvalidArgument, [&] { row(torch::ones({2, rank == 0 ? 2 : 3})); });

    ColumnParallelLinear gathering(ColumnParallelLinearOptions(3, 5).gather_output(true));
    ErrorOf(ErrorCode::Mismatch, [&] { gathering(torch::ones({1 + rank, 3})); });
    ErrorOf(ErrorCode::InvalidArgument, [&] { gathering(torch::ones({1, 3 + rank})); });
    EXPECT_EQ(gathering(torch::ones({2, 3})).size(1), 5);
    RowParallelLinear whole(RowParallelLinearOptions(4, 3).input_is_parallel(false));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          whole(torch::ones({2, 5}));
                        }),
                HasSubstr("its last dimension must have all 4 features"));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          row(torch::ones({2, 4}));
                        }),
                AllOf(HasSubstr("input has 4 features"), HasSubstr("input_is_parallel(false)")));
    ColumnParallelLinear column(ColumnParallelLinearOptions(3, 5));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          column(torch::ones({2, 4}));
                        }),
                AllOf(HasSubstr("ColumnParallelLinear #"), HasSubstr("has to have 3")));
    const torch::Tensor y = column(torch::ones({1 + rank, 3}).requires_grad_());
    ErrorOf(ErrorCode::Mismatch, [&] { y.sum().backward(); });

    ParallelEmbedding words(ParallelEmbeddingOptions(5, 2));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          words(torch::tensor({0, rank == 1 ? 5 : 4}));
                        }),
                HasSubstr("id 5 is none of the 5 embeddings"));
    ParallelCrossEntropy loss(ParallelCrossEntropyOptions(4));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          loss(torch::zeros({1, 2}), torch::tensor({rank == 0 ? 4 : 0}));
                        }),
                HasSubstr("target 4 is none of the 4 classes"));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          loss(torch::zeros({1, 4}), torch::tensor({0}));
                        }),
                HasSubstr("must have the 2 classes of this rank, of 4 on 2 ranks"));
    ErrorOf(ErrorCode::Mismatch, [&] {
      loss(torch::zeros({1 + rank, 2}), torch::zeros({1 + rank}, torch::kLong));
    });
    // The layers go on after an error.
    EXPECT_EQ(row(torch::ones({2, 2})).size(0), 2);
  });
}

TEST(TensorParallelRefusalTest, DifferentPartsAreNotMixed) {
  RunTorchRanks(2, [](int) {
    ColumnParallelLinear layer(ColumnParallelLinearOptions(3, 4));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { broadcast_parameters(*layer, 0); }),
                AllOf(HasSubstr("part 0 of 2 along dimension 0 on rank 0"),
                      HasSubstr("part 1 of 2 along dimension 0 on rank 1")));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          auto optimizer =
                              DistributedOptimizer(torch::optim::SGD(layer->parameters(), 0.1),
                                                   layer->named_parameters());
                        }),
                HasSubstr("part 1 of 2"));
    torch::optim::SGD sgd(layer->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { broadcast_optimizer_state(sgd, 0); }),
                AllOf(HasSubstr("part 0 of 2"), HasSubstr("part 1 of 2")));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          save_checkpoint(testing::TempDir() + "split_optimizer.pt",
                                          Checkpoint().optimizer(sgd));
                        }),
                HasSubstr("part 1 of 2"));
    // A checkpoint has one model for all ranks.
    const std::string file = testing::TempDir() + "split_layer.pt";
    EXPECT_THAT(
        ErrorOf(ErrorCode::Mismatch, [&] { save_checkpoint(file, Checkpoint().model(*layer)); }),
        HasSubstr("part 1 of 2"));
  });
}

TEST(TensorParallelRefusalTest, ACopyOnOneRankIsToldToAllByTheNextLayer) {
  RunTorchRanks(2, [](int rank) {
    ColumnParallelLinear layer(ColumnParallelLinearOptions(3, 4));
    if (rank == 0) (void)layer->clone();
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [] { ColumnParallelLinear next(ColumnParallelLinearOptions(3, 4)); }),
                AllOf(HasSubstr("place 3 among the split layers of its set"),
                      HasSubstr("place 2 among the split layers of its set")));
  });
}

TEST(TensorParallelLossTest, AMeanOfManyLossesInFloat16IsFinite) {
  for (const int ranks : {1, 2}) {
    RunTorchRanks(ranks, [ranks](int rank) {
      ParallelCrossEntropy loss(ParallelCrossEntropyOptions(4));
      torch::Tensor logits = torch::zeros({8192, 4 / ranks}, torch::kHalf);
      if (rank == 0) logits.select(1, 0).fill_(10);
      const torch::Tensor mean = loss(logits, torch::ones({8192}, torch::kLong));
      EXPECT_EQ(mean.scalar_type(), torch::kHalf);
      EXPECT_NEAR(mean.item<float>(), 10, 0.01);
    });
  }
}

TEST(TensorParallelLossTest, TargetsOfAnotherShapeAreRefused) {
  for (const int ranks : {1, 2}) {
    RunTorchRanks(ranks, [ranks](int) {
      ParallelCrossEntropy loss(ParallelCrossEntropyOptions(8));
      const torch::Tensor logits = torch::zeros({2, 3, 8 / ranks});
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                          [&] {
                            loss(logits, torch::zeros({3, 2}, torch::kLong));
                          }),
                  HasSubstr("the targets are int64 [3, 2]"));
      loss(logits, torch::zeros({2, 3}, torch::kLong));
      loss(logits, torch::zeros({6}, torch::kLong));
      loss(logits.flatten(0, 1), torch::zeros({2, 3}, torch::kLong));
    });
  }
}

TEST(TensorParallelStateTest, AWholeStateIsThatOfOneMoment) {
  RunTorchRanks(2, [](int) {
    RowParallelLinear layer(RowParallelLinearOptions(4, 3));
    const auto state = whole_state(*layer);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : layer->parameters()) parameter.fill_(5);
    }
    EXPECT_FALSE(state["bias"].eq(5).any().item<bool>());
    load_whole_state(*layer, state);
    EXPECT_TRUE(layer->bias.equal(state["bias"]));
    EXPECT_TRUE(whole_of(layer->weight).equal(state["weight"]));
  });
}

TEST(TensorParallelRefusalTest, StateThatDoesNotFitChangesNothing) {
  RunTorchRanks(2, [](int) {
    ColumnParallelLinear layer(ColumnParallelLinearOptions(3, 5));
    const auto before = whole_state(*layer);
    auto state = before;
    state["bias"] = torch::ones({4});
    state["weight"] = torch::ones({5, 3});
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { load_whole_state(*layer, state); }),
                HasSubstr("\"bias\" is float32 [4] in the state; its whole here is float32 [5]"));
    torch::OrderedDict<std::string, torch::Tensor> less;
    less.insert("weight", torch::ones({5, 3}));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { load_whole_state(*layer, less); }),
                HasSubstr("\"bias\" is not in the state"));
    auto more = before;
    more.insert("other", torch::ones({1}));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { load_whole_state(*layer, more); }),
                HasSubstr("has no \"other\""));
    EXPECT_TRUE(whole_of(layer->weight).equal(before["weight"]));
  });
}

TEST(TensorParallelRefusalTest, SplitParametersNeedAnOrdinaryNorm) {
  RunTorchRanks(2, [](int) {
    ColumnParallelLinear layer(ColumnParallelLinearOptions(3, 4));
    layer(torch::ones({1, 3})).sum().backward();
    torch::optim::SGD sgd(layer->parameters(), 0.1);
    ErrorOf(ErrorCode::InvalidArgument, [&] { clip_grad_norm_(sgd, 1.0, 0.0); });
    EXPECT_NEAR(clip_grad_norm_(sgd, 1e9), 4, 1e-6);  // 12 weights and 4 biases of 1
  });
}

TEST(TensorParallelRefusalTest, NormsOfPartsNeedWholeGradients) {
  RunTorchRanks(4, [](int) {
    const Mesh grid = mesh({{"data", 2}, {"tensor", 2}});
    for (const Shard shard : {Shard::OptimizerState, Shard::Gradients}) {
      ColumnParallelLinear layer(ColumnParallelLinearOptions(3, 4).process_set(grid.set("tensor")));
      auto optimizer = DistributedOptimizer(
          torch::optim::SGD(layer->parameters(), 0.1), layer->named_parameters(),
          DistributedOptimizerOptions().process_set(grid.set("data")).shard(shard));
      layer(torch::ones({1, 3})).sum().backward();
      if (shard == Shard::OptimizerState) {
        EXPECT_NEAR(clip_grad_norm_(optimizer, 1e9), 4, 1e-6);
        optimizer.step();
      } else {
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { clip_grad_norm_(optimizer, 1e9); }),
                    HasSubstr("need Shard::OptimizerState in place of Shard::Gradients"));
      }
    }
  });
}

}  // namespace
}  // namespace sirtaki::tests
