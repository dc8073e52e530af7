#include "sirtaki/sync_batch_norm.h"
#include "sirtaki/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <future>
#include <numeric>
#include <sstream>
#include <thread>
#include <vector>

#include "sirtaki/barrier.h"
#include "sirtaki/collectives.h"
#include "sirtaki/optimizer.h"
#include "tests/torch/batch_norm/norm_net.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using torch::nn::BatchNormOptions;

constexpr std::int64_t kChannels = 3;

// A batch whose mean and spread differ from rank to rank and from channel to channel.
torch::Tensor Input(std::int64_t rows, const std::vector<std::int64_t>& rest, double phase,
                    int rank) {
  std::vector<std::int64_t> shape = {rows, kChannels};
  shape.insert(shape.end(), rest.begin(), rest.end());
  std::vector<std::int64_t> by_channel(shape.size(), 1);
  by_channel[1] = kChannels;
  return Waves(shape, phase + 3 * rank) * (1 + rank) +
         torch::arange(kChannels, torch::kDouble).reshape(by_channel) + 2 * rank;
}

// Sums over the batch, so that the loss of the joined batch is the sum of the ranks' losses.
torch::Tensor SumLoss(const torch::Tensor& y) {
  return (y.pow(2) * 0.5 + y.pow(3) + y.sin()).sum();
}

double Far(const torch::Tensor& a, const torch::Tensor& b) {
  if (!a.defined() && !b.defined()) return 0;
  if (a.sizes() != b.sizes()) return 1e300;
  if (a.numel() == 0) return 0;
  return (a - b).abs().max().item<double>();
}

struct Case {
  std::vector<std::int64_t> rows_of_rank;
  std::vector<std::int64_t> rest = {};  // the dimensions behind N and C
  BatchNormOptions options = BatchNormOptions(kChannels);
  c10::MemoryFormat format = c10::MemoryFormat::Contiguous;
};

// One rank's view of three steps, compared with a BatchNorm that sees the joined batch.
template <class BatchNorm>
void CompareRank(const Case& c, int rank) {
  constexpr double kClose = 1e-12;
  const auto ranks = static_cast<int>(c.rows_of_rank.size());
  SyncBatchNorm norm(c.options);
  BatchNorm joined(c.options);
  norm->to(torch::kDouble);
  joined->to(torch::kDouble);
  for (int step = 0; step < 3; ++step) {
    SCOPED_TRACE("rank " + std::to_string(rank) + ", step " + std::to_string(step));
    std::vector<torch::Tensor> parts;
    for (int r = 0; r < ranks; ++r) {
      parts.push_back(Input(c.rows_of_rank[static_cast<std::size_t>(r)], c.rest, 10 * step, r));
    }
    auto all = torch::cat(parts).to(c.format).set_requires_grad(true);
    auto mine = parts[static_cast<std::size_t>(rank)].to(c.format).set_requires_grad(true);
    const auto y_all = joined->forward(all);
    const auto y = norm->forward(mine);
    const std::int64_t from =
        std::accumulate(c.rows_of_rank.begin(), c.rows_of_rank.begin() + rank, std::int64_t{0});
    EXPECT_LT(Far(y, y_all.narrow(0, from, y.size(0))), kClose);
    EXPECT_TRUE(y.is_contiguous(c.format));

    SumLoss(y_all).backward();
    SumLoss(y).backward();
    EXPECT_LT(Far(mine.grad(), all.grad().narrow(0, from, y.size(0))), 100 * kClose);
    for (auto [own, expected] :
         {std::pair(norm->weight, joined->weight), std::pair(norm->bias, joined->bias)}) {
      if (!expected.defined()) continue;
      const auto sum = allreduce(own.grad(), AllreduceOptions().op(ReduceOp::Sum));
      EXPECT_LT(Far(sum, expected.grad()), 100 * kClose);
      torch::NoGradGuard no_grad;
      own -= 0.001 * sum;
      expected -= 0.001 * expected.grad();
      own.mutable_grad().reset();
      expected.mutable_grad().reset();
    }
    EXPECT_LT(Far(norm->running_mean, joined->running_mean), kClose);
    EXPECT_LT(Far(norm->running_var, joined->running_var), kClose);
    if (joined->num_batches_tracked.defined()) {
      EXPECT_TRUE(norm->num_batches_tracked.equal(joined->num_batches_tracked));
    }
  }
  norm->eval();
  joined->eval();
  const auto x = Input(4, c.rest, 77, rank);
  EXPECT_LT(Far(norm->forward(x), joined->forward(x)), kClose);
}

template <class BatchNorm>
void ExpectFollowsJoinedBatch(const Case& c) {
  RunTorchRanks(static_cast<int>(c.rows_of_rank.size()),
                [&](int rank) { CompareRank<BatchNorm>(c, rank); });
}

TEST(SyncBatchNormTest, OneTwoAndThreeRanksFollowTheJoinedBatch) {
  ExpectFollowsJoinedBatch<torch::nn::BatchNorm1d>({{5}});
  ExpectFollowsJoinedBatch<torch::nn::BatchNorm1d>({{5, 5}});
  ExpectFollowsJoinedBatch<torch::nn::BatchNorm1d>({{5, 5, 5}});
}

TEST(SyncBatchNormTest, TakesTwoToFiveDimensions) {
  ExpectFollowsJoinedBatch<torch::nn::BatchNorm1d>({{4, 4}, {6}});
  ExpectFollowsJoinedBatch<torch::nn::BatchNorm2d>({{4, 4}, {5, 4}});
  ExpectFollowsJoinedBatch<torch::nn::BatchNorm3d>({{4, 4}, {3, 2, 4}});
}

TEST(SyncBatchNormTest, BatchesMayDifferInSize) {
  ExpectFollowsJoinedBatch<torch::nn::BatchNorm2d>({{1, 7, 2}, {3, 3}});
  ExpectFollowsJoinedBatch<torch::nn::BatchNorm1d>({{1, 1, 1}});  // one value each
}

TEST(SyncBatchNormTest, BatchesMayBeEmptyOnSomeRanks) {
  ExpectFollowsJoinedBatch<torch::nn::BatchNorm1d>({{0, 6}});
  ExpectFollowsJoinedBatch<torch::nn::BatchNorm2d>({{6, 0, 1}, {3, 3}});
}

TEST(SyncBatchNormTest, KeepsTheChannelsLast) {
  ExpectFollowsJoinedBatch<torch::nn::BatchNorm2d>(
      {{3, 2}, {4, 5}, BatchNormOptions(kChannels), c10::MemoryFormat::ChannelsLast});
  ExpectFollowsJoinedBatch<torch::nn::BatchNorm3d>(
      {{3, 2}, {2, 4, 5}, BatchNormOptions(kChannels), c10::MemoryFormat::ChannelsLast3d});
}

TEST(SyncBatchNormTest, TakesEveryOption) {
  const BatchNormOptions base(kChannels);
  for (BatchNormOptions options :
       {BatchNormOptions(base).affine(false), BatchNormOptions(base).eps(0.5).momentum(0.7),
        BatchNormOptions(base).momentum(std::nullopt),
        BatchNormOptions(base).track_running_stats(false),
        BatchNormOptions(base).momentum(std::nullopt).track_running_stats(false)}) {
    for (const std::vector<std::int64_t>& rows : {std::vector<std::int64_t>{4}, {3, 4}}) {
      ExpectFollowsJoinedBatch<torch::nn::BatchNorm2d>({rows, {2, 3}, options});
    }
  }
}

TEST(SyncBatchNormTest, AnInputThatDoesNotLieFlatIsRight) {
  RunTorchRanks(2, [](int rank) {
    SyncBatchNorm norm(BatchNormOptions{kChannels});
    norm->to(torch::kDouble);
    const auto x = Input(4, {5}, 0, rank);
    auto flat = x.clone().set_requires_grad(true);
    auto turned = x.permute({2, 0, 1}).contiguous().permute({1, 2, 0}).set_requires_grad(true);
    ASSERT_FALSE(turned.is_contiguous());
    const auto a = norm->forward(flat);
    const auto b = norm->forward(turned);
    EXPECT_LT(Far(a, b), 1e-13);
    // The gradient that comes in has strides of 0 in one case, and those of the input in the other.
    (a * Waves({4, 1, 1}, 9)).sum().backward();
    (b * Waves({4, 1, 1}, 9)).sum().backward();
    EXPECT_LT(Far(flat.grad(), turned.grad()), 1e-13);
    EXPECT_GT(flat.grad().abs().max().item<double>(), 0.01);
  });
}

TEST(SyncBatchNormTest, MeansFarFromZeroKeepTheirDigits) {
  constexpr int kSize = 2;
  std::vector<torch::Tensor> parts;
  for (int rank = 0; rank < kSize; ++rank) {
    parts.push_back((3000 + rank + 0.1 * Input(500, {}, 0, 0)).to(torch::kFloat));
  }
  const auto expected = torch::cat(parts).to(torch::kDouble).var(0, /*unbiased=*/true);
  RunTorchRanks(kSize, [&](int rank) {
    SyncBatchNorm norm(BatchNormOptions(kChannels).momentum(1.0));
    norm->forward(parts[static_cast<std::size_t>(rank)]);
    EXPECT_LT(Far(norm->running_var / expected, torch::ones({kChannels})), 1e-3);
  });
}

// Values and gradients are rounded once, as in PyTorch's BatchNorm on half types.
TEST(SyncBatchNormTest, HalfTypesComputeInFloat32) {
  for (const auto type : {torch::kHalf, torch::kBFloat16}) {
    for (const bool half_parameters : {false, true}) {
      RunTorchRanks(2, [&](int rank) {
        const double step = type == torch::kHalf ? 1e-3 : 8e-3;  // half of the last digit
        SyncBatchNorm norm(BatchNormOptions{kChannels});
        SyncBatchNorm exact(BatchNormOptions{kChannels});
        exact->to(torch::kDouble);
        if (half_parameters) norm->to(type);
        auto x = Input(8, {5}, 0, rank).to(type).set_requires_grad(true);
        auto wide = x.detach().to(torch::kDouble).set_requires_grad(true);
        const auto y = norm->forward(x);
        const auto y_wide = exact->forward(wide);
        EXPECT_EQ(y.scalar_type(), type);
        EXPECT_LT(Far(y, y_wide), step * y_wide.abs().max().item<double>());
        const auto weights = Waves({8, kChannels, 5}, 4).to(type);
        (y * weights).sum().backward();
        (y_wide * weights.to(torch::kDouble)).sum().backward();
        EXPECT_EQ(x.grad().scalar_type(), type);
        EXPECT_LT(Far(x.grad(), wide.grad()), 2 * step * wide.grad().abs().max().item<double>());
        EXPECT_EQ(norm->weight.grad().scalar_type(), norm->weight.scalar_type());
        EXPECT_LT(Far(norm->weight.grad(), exact->weight.grad()),
                  2 * step * exact->weight.grad().abs().max().item<double>());
        if (!half_parameters) {
          EXPECT_LT(Far(norm->running_var, exact->running_var), 1e-6);
        }
      });
    }
  }
}

TEST(SyncBatchNormTest, AllBatchesEmptyChangeNothing) {
  RunTorchRanks(2, [](int) {
    SyncBatchNorm norm(BatchNormOptions{kChannels});
    auto x = torch::zeros({0, kChannels, 2}, torch::requires_grad());
    const auto y = norm->forward(x);
    EXPECT_EQ(y.sizes(), x.sizes());
    y.sum().backward();
    EXPECT_EQ(norm->weight.grad().abs().sum().item<double>(), 0);
    EXPECT_TRUE(norm->running_mean.equal(torch::zeros({kChannels})));
    EXPECT_TRUE(norm->running_var.equal(torch::ones({kChannels})));
  });
}

// Neither rank waits for the other: only one of them calls anything.
TEST(SyncBatchNormTest, EvaluationAsksNobody) {
  RunTorchRanks(2, [](int rank) {
    if (rank == 1) return;
    SyncBatchNorm norm(BatchNormOptions{kChannels});
    norm->eval();
    auto x = torch::ones({2, kChannels}, torch::requires_grad());
    norm->forward(x).sum().backward();
    EXPECT_TRUE(x.grad().defined());
  });
  SyncBatchNorm without_session(BatchNormOptions(kChannels).track_running_stats(false));
  without_session->eval();
  const auto x = Waves({5, kChannels}, 0).to(torch::kFloat);
  torch::nn::BatchNorm1d plain(BatchNormOptions(kChannels).track_running_stats(false));
  plain->eval();
  EXPECT_TRUE(without_session->forward(x).equal(plain->forward(x)));
}

TEST(SyncBatchNormTest, TrainingNeedsASession) {
  SyncBatchNorm norm(kChannels);
  EXPECT_THAT(ErrorOf(ErrorCode::NotInitialized,
                      [&] {
                        norm->forward(torch::ones({2, 3}));
                      }),
              HasSubstr("sirtaki::init()"));
}

// Twice in one graph, three graphs that wait at the same time, and one module without gradients.
TEST(SyncBatchNormTest, AModuleMayBeUsedSeveralTimesBeforeBackward) {
  RunTorchRanks(2, [](int rank) {
    SyncBatchNorm norm(BatchNormOptions{kChannels});
    auto joined = torch::nn::BatchNorm1d(BatchNormOptions(kChannels));
    norm->to(torch::kDouble);
    joined->to(torch::kDouble);
    const auto run = [](auto& module, const torch::Tensor& x, const torch::Tensor& other) {
      return module->forward(module->forward(x).tanh() * 3 + other);
    };
    std::vector<torch::Tensor> all;
    std::vector<torch::Tensor> mine;
    std::vector<torch::Tensor> losses_all;
    std::vector<torch::Tensor> losses;
    for (int graph = 0; graph < 3; ++graph) {
      const auto x0 = Input(4, {}, graph, 0);
      const auto x1 = Input(4, {}, graph, 1);
      all.push_back(torch::cat({x0, x1}).set_requires_grad(true));
      mine.push_back((rank == 0 ? x0 : x1).set_requires_grad(true));
      losses_all.push_back(SumLoss(run(joined, all.back(), all.back())));
      losses.push_back(SumLoss(run(norm, mine.back(), mine.back())));
    }
    for (const std::size_t graph : {1u, 0u, 2u}) {  // not the order of forward()
      losses_all[graph].backward({}, /*keep_graph=*/true);
      losses[graph].backward({}, /*keep_graph=*/true);
      EXPECT_LT(Far(mine[graph].grad(), all[graph].grad().narrow(0, 4 * rank, 4)), 1e-10);
    }
    losses[1].backward();  // once more
    EXPECT_LT(Far(mine[1].grad(), 2 * all[1].grad().narrow(0, 4 * rank, 4)), 1e-10);
    const auto weight = allreduce(norm->weight.grad(), AllreduceOptions().op(ReduceOp::Sum));
    losses_all[1].backward();
    EXPECT_LT(Far(weight, joined->weight.grad()), 1e-9);
  });
}

// Two threads on each rank; the ranks' first threads run different graphs.
TEST(SyncBatchNormTest, BackwardsInThreadsMayMeetInAnyOrder) {
  RunTorchRanks(2, [](int rank) {
    SyncBatchNorm norm(BatchNormOptions{kChannels});
    norm->to(torch::kDouble);
    std::vector<torch::Tensor> inputs;
    std::vector<torch::Tensor> losses;
    std::vector<torch::Tensor> expected;
    for (int graph = 0; graph < 2; ++graph) {
      const auto x = Input(4, {}, graph, rank);
      inputs.push_back(x.clone().set_requires_grad(true));
      losses.push_back(SumLoss(norm->forward(inputs.back())));
      expected.push_back(
          torch::autograd::grad({losses.back()}, {inputs.back()}, {}, /*retain_graph=*/true)[0]);
    }
    // The second starts when the first is at work or done; it must not need that it is done.
    const auto first = static_cast<std::size_t>(rank);
    auto running = std::async(std::launch::async, [&] { losses[first].backward(); });
    losses[1 - first].backward();
    running.get();
    for (std::size_t graph = 0; graph < 2; ++graph) {
      EXPECT_LT(Far(inputs[graph].grad(), expected[graph]), 1e-12);
    }
  });
}

TEST(SyncBatchNormTest, BackwardsOfDifferentCallsAreNotMixed) {
  RunTorchRanks(2, [](int rank) {
    SyncBatchNorm norm(BatchNormOptions(kChannels), ProcessSet(), "norm");
    std::vector<torch::Tensor> losses;
    for (int call = 0; call <= 16; ++call) {  // so many that the first and the last share a name
      auto x = Input(4, {}, call, rank).to(torch::kFloat).set_requires_grad(true);
      losses.push_back(norm->forward(x).pow(2).sum());
    }
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { losses[rank == 0 ? 0 : 16].backward(); }),
                AllOf(HasSubstr("sync_batch_norm/norm/backward 0"), HasSubstr("same order")));
    losses[5].backward();  // the others are as they were
  });
}

TEST(SyncBatchNormTest, TheFirstLayerNeedsNoBackwardOfTheOthers) {
  RunTorchRanks(2, [](int rank) {
    SyncBatchNorm norm(BatchNormOptions{kChannels});
    const auto x = Input(4, {}, 0, rank).to(torch::kFloat);
    const auto y = norm->forward(x);
    if (rank == 1) return;  // has no backward
    y.pow(2).sum().backward();
    EXPECT_GT(norm->weight.grad().abs().sum().item<double>(), 0);
  });
}

// One rank's input is data, the other's comes from a layer.
TEST(SyncBatchNormTest, AnInputThatNeedsAGradientOnOneRankOnlyIsRight) {
  RunTorchRanks(2, [](int rank) {
    SyncBatchNorm norm(BatchNormOptions{kChannels});
    auto joined = torch::nn::BatchNorm1d(BatchNormOptions(kChannels));
    norm->to(torch::kDouble);
    joined->to(torch::kDouble);
    auto x = Input(4, {}, 0, rank).set_requires_grad(rank == 0);
    auto all = torch::cat({Input(4, {}, 0, 0), Input(4, {}, 0, 1)}).set_requires_grad(true);
    SumLoss(norm->forward(x)).backward();
    SumLoss(joined->forward(all)).backward();
    EXPECT_EQ(x.grad().defined(), rank == 0);
    if (rank == 0) {
      EXPECT_LT(Far(x.grad(), all.grad().narrow(0, 0, 4)), 1e-11);
    }
  });
}

TEST(SyncBatchNormTest, GraphsThatDifferAreRefused) {
  RunTorchRanks(3, [](int rank) {
    SyncBatchNorm norm(BatchNormOptions(kChannels), ProcessSet(), "norm");
    const auto x = Input(4, {}, 0, rank).to(torch::kFloat);
    const auto mean = norm->running_mean.clone();
    const torch::AutoGradMode mode(rank != 1);
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { norm->forward(x); }),
                HasSubstr("\"sync_batch_norm/norm\": a gradient to compute on ranks 0, 2; none on "
                          "rank 1"));
    EXPECT_TRUE(norm->running_mean.equal(mean));
    const torch::NoGradGuard none;
    EXPECT_FALSE(norm->forward(x).requires_grad());  // the next call goes on
  });
}

TEST(SyncBatchNormTest, AnInputThatDoesNotFitIsToldToAllRanks) {
  RunTorchRanks(2, [](int rank) {
    SyncBatchNorm norm(BatchNormOptions(kChannels), ProcessSet(), "norm");
    const auto refusal = [&](const torch::Tensor& wrong) {
      const auto x = rank == 1 ? wrong : torch::ones({2, kChannels});
      const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] { norm->forward(x); });
      EXPECT_THAT(text, AllOf(HasSubstr("sync_batch_norm/norm"), HasSubstr("rank 1")));
      return text;
    };
    EXPECT_THAT(refusal(torch::ones({2, 5})),
                HasSubstr("the input is float32 [2, 5]; its shape must be [N, 3, ...]"));
    EXPECT_THAT(refusal(torch::ones({3})), HasSubstr("the input is float32 [3]; its shape must"));
    EXPECT_THAT(refusal(torch::ones({2, 3}, torch::kLong)),
                HasSubstr("the input is int64 [2, 3]; supp"));
    EXPECT_THAT(refusal(torch::ones({2, 3}, torch::kDouble)),
                HasSubstr("the input is float64 [2, 3], but the weight is float32 [3]"));
    EXPECT_THAT(refusal(torch::Tensor()), HasSubstr("the tensor is undefined"));
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 0);
    norm->forward(torch::ones({2, kChannels}));  // the name is free again
  });
  RunTorchRanks(1, [](int) {
    SyncBatchNorm norm(BatchNormOptions{kChannels});
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          norm->forward(torch::ones({2, 5}));
                        }),
                HasSubstr("\"sync_batch_norm/#1\": the input is float32 [2, 5]"));
  });
}

TEST(SyncBatchNormTest, ASingleValuePerChannelIsRefused) {
  for (const int size : {1, 2}) {
    RunTorchRanks(size, [](int rank) {
      SyncBatchNorm norm(BatchNormOptions{kChannels});
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                          [&] {
                            norm->forward(torch::ones({rank == 0 ? 1 : 0, kChannels}));
                          }),
                  HasSubstr("single value per channel"));
    });
  }
}

TEST(SyncBatchNormTest, GradientsOfGradientsAreRefused) {
  RunTorchRanks(2, [](int rank) {
    SyncBatchNorm norm(BatchNormOptions(kChannels), ProcessSet(), "norm");
    norm->to(torch::kDouble);
    auto x = Input(4, {}, 0, rank).set_requires_grad(true);
    const auto y = norm->forward(x);
    const auto plain = torch::autograd::grad({SumLoss(y)}, {x}, {}, /*retain_graph=*/true)[0];
    const auto gradient = torch::autograd::grad({SumLoss(y)}, {x}, {}, /*retain_graph=*/true,
                                                /*create_graph=*/true)[0];
    EXPECT_TRUE(gradient.equal(plain));
    EXPECT_THAT(ErrorOf(ErrorCode::Unsupported, [&] { gradient.pow(2).sum().backward(); }),
                AllOf(HasSubstr("sync_batch_norm/norm"), HasSubstr("differentiated twice")));
  });
}

TEST(SyncBatchNormTest, ACloneIsAModuleOfItsOwn) {
  RunTorchRanks(2, [](int rank) {
    SyncBatchNorm norm(BatchNormOptions(kChannels).momentum(0.5), ProcessSet(), "norm");
    auto clone = std::dynamic_pointer_cast<SyncBatchNormImpl>(norm->clone());
    ASSERT_TRUE(clone);
    const auto a = Input(4, {}, 0, rank).to(torch::kFloat).set_requires_grad(true);
    const auto b = Input(4, {}, 1, rank).to(torch::kFloat).set_requires_grad(true);
    const auto y = norm->forward(a);
    const auto z = clone->forward(b);
    EXPECT_FALSE(norm->running_mean.equal(clone->running_mean));
    // Both under way at once, in different orders: the names differ.
    auto other =
        std::async(std::launch::async, [&] { (rank == 0 ? y : z).pow(2).sum().backward(); });
    (rank == 0 ? z : y).pow(2).sum().backward();
    other.get();
    EXPECT_TRUE(norm->weight.grad().defined() && clone->weight.grad().defined());
  });
}

TEST(SyncBatchNormTest, BackwardAfterTheSessionIsRefused) {
  std::vector<torch::Tensor> losses(2);
  RunTorchRanks(2, [&](int rank) {
    SyncBatchNorm norm(BatchNormOptions{kChannels});
    auto x = Input(4, {}, 0, rank).to(torch::kFloat).set_requires_grad(true);
    losses[static_cast<std::size_t>(rank)] = norm->forward(x).pow(2).sum();
  });
  for (const auto& loss : losses) {
    ErrorOf(ErrorCode::NotInitialized, [&] { loss.backward(); });
  }
}

TEST(SyncBatchNormTest, HasTheTensorsOfBatchNorm) {
  const auto options = BatchNormOptions(kChannels).eps(0.25).momentum(0.5);
  torch::nn::BatchNorm2d plain(options);
  {
    torch::NoGradGuard no_grad;
    plain->weight.copy_(Waves({kChannels}, 1));
    plain->running_var.fill_(2);
    plain->num_batches_tracked.fill_(7);
  }
  std::stringstream stream;
  torch::save(plain, stream);
  SyncBatchNorm norm(options);
  torch::load(norm, stream);
  EXPECT_EQ(norm->named_parameters().keys(), plain->named_parameters().keys());
  EXPECT_EQ(norm->named_buffers().keys(), plain->named_buffers().keys());
  EXPECT_TRUE(norm->weight.equal(plain->weight));
  EXPECT_TRUE(norm->running_var.equal(plain->running_var));
  EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 7);
  norm->reset_parameters();
  EXPECT_TRUE(norm->weight.equal(torch::ones({kChannels})));
  EXPECT_TRUE(norm->running_var.equal(torch::ones({kChannels})));
  std::stringstream printed;
  printed << SyncBatchNorm(BatchNormOptions(3).momentum(std::nullopt)) << norm;
  EXPECT_EQ(printed.str(),
            "sirtaki::SyncBatchNorm(3, eps=1e-05, momentum=None, affine=true, "
            "track_running_stats=true)"
            "sirtaki::SyncBatchNorm(3, eps=0.25, momentum=0.5, affine=true, "
            "track_running_stats=true)");
}

TEST(SyncBatchNormTest, ANetTrainsAsOnTheJoinedBatch) {
  constexpr int kSteps = 10;
  for (const int size : {1, 2, 3}) {
    const auto expected = TrainNormNetAlone(kSteps, size);
    RunTorchRanks(size, [&](int rank) {
      auto net =
          MakeNormNet(SyncBatchNorm(BatchNormOptions(4)), SyncBatchNorm(BatchNormOptions(3)));
      auto optimizer = DistributedOptimizer(
          torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)),
          net->named_parameters());
      for (int step = 0; step < kSteps; ++step) {
        optimizer.zero_grad();
        NormLoss(net, ImagesOfRank(step, rank)).backward();
        optimizer.step();
      }
      auto all = net->parameters();
      for (const auto& buffer : net->buffers()) all.push_back(buffer.to(torch::kDouble));
      EXPECT_LT(Distance(all, expected), 1e-11);
    });
  }
}

// What a rank that has joined brings is nothing, in forward() and in backward().
TEST(SyncBatchNormTest, GoesOnWithTheRanksThatHaveNotJoined) {
  RunTorchRanks(3, [](int rank) {
    SyncBatchNorm norm{BatchNormOptions(kChannels)};
    norm->to(torch::kDouble);
    const auto step = [&] {
      const auto x = Input(4, {}, 1, rank).requires_grad_();
      const auto y = norm->forward(x);
      SumLoss(y).backward();
      return std::pair(x, y);
    };
    step();
    if (rank != 0) {
      step();  // rank 0 has made a call less from here on
      const auto all = torch::cat({Input(4, {}, 1, 1), Input(4, {}, 1, 2)}).requires_grad_();
      torch::nn::BatchNorm1d joined{BatchNormOptions(kChannels)};
      joined->to(torch::kDouble);
      const auto y_all = joined->forward(all);
      SumLoss(y_all).backward();
      const auto [x, y] = step();
      EXPECT_LT(Far(y, y_all.slice(0, 4 * (rank - 1), 4 * rank)), 1e-9);
      EXPECT_LT(Far(x.grad(), all.grad().slice(0, 4 * (rank - 1), 4 * rank)), 1e-8);
      const auto frozen = Input(4, {}, 1, rank);
      norm->weight.requires_grad_(rank == 2);
      norm->bias.requires_grad_(rank == 2);
      EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { norm->forward(frozen); }),
                  AllOf(HasSubstr("none on rank 1"), HasSubstr("a gradient to compute on rank 2")));
      norm->weight.requires_grad_(true);
      norm->bias.requires_grad_(true);
    }
    join();
    step();
  });
}

}  // namespace
}  // namespace sirtaki::tests
