// SyncBatchNorm with inputs on GPUs, which are fakes, against a BatchNorm on the CPU that sees the
// joined batch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>
#include <string>
#include <vector>

#include "sirtaki/torch.h"
#include "tests/torch/gpu/gpu_ranks.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using ::testing::HasSubstr;
using torch::nn::BatchNormOptions;

constexpr std::int64_t kChannels = 3;

struct Case {
  std::vector<std::int64_t> rows_of_rank;
  std::vector<std::int64_t> rest = {};  // the dimensions behind N and C
  BatchNormOptions options = BatchNormOptions(kChannels);
  c10::MemoryFormat format = c10::MemoryFormat::Contiguous;
  at::ScalarType type = at::kDouble;
  at::ScalarType module_type = at::kDouble;
  double close = 1e-10;
};

// A batch whose mean and spread differ from rank to rank and from channel to channel.
at::Tensor Input(std::int64_t rows, const std::vector<std::int64_t>& rest, double phase, int rank) {
  std::vector<std::int64_t> shape = {rows, kChannels};
  shape.insert(shape.end(), rest.begin(), rest.end());
  std::vector<std::int64_t> by_channel(shape.size(), 1);
  by_channel[1] = kChannels;
  return Waves(shape, phase + 3 * rank) * (1 + rank) +
         torch::arange(kChannels, torch::kDouble).reshape(by_channel) + 2 * rank;
}

// What autograd brings to y: that of a loss that sums over the batch.
at::Tensor Slope(const at::Tensor& y) { return y + y.cos(); }

double Far(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() && !b.defined()) return 0;
  const at::Tensor on_host = a.detach().cpu().to(at::kDouble);
  if (on_host.sizes() != b.sizes()) return 1e300;
  return b.numel() == 0 ? 0 : (on_host - b.detach()).abs().max().item<double>();
}

class GpuSyncBatchNormTest : public GpuRanksTest {
 protected:
  void ExpectFollowsJoinedBatch(const Case& c) {
    RunRanks(static_cast<int>(c.rows_of_rank.size()),
             [&c](GpuRank& rank) { CompareRank(c, rank); });
  }

 private:
  static void CompareRank(const Case& c, GpuRank& rank) {
    const at::Device device = Cuda(rank.device());
    SyncBatchNorm norm(c.options);
    torch::nn::BatchNorm2d joined(c.options);
    norm->to(device, c.module_type);
    joined->to(at::kDouble);
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE("rank " + std::to_string(rank.number()) + ", step " + std::to_string(step));
      std::vector<at::Tensor> parts;
      for (std::size_t r = 0; r < c.rows_of_rank.size(); ++r) {
        parts.push_back(
            Input(c.rows_of_rank[r], c.rest, 10 * step, static_cast<int>(r)).to(c.type));
      }
      at::Tensor all = torch::cat(parts).to(at::kDouble);
      // BatchNorm2d takes four dimensions, of which BatchNorm does not mind how many there are.
      all = all.reshape({all.size(0), kChannels, -1, 1}).set_requires_grad(true);
      const at::Tensor y_all = joined->forward(all);
      const at::Tensor dy_all = Slope(y_all.detach());
      y_all.backward(dy_all);

      const auto number = static_cast<std::size_t>(rank.number());
      const std::int64_t from = std::accumulate(
          c.rows_of_rank.begin(), c.rows_of_rank.begin() + rank.number(), std::int64_t{0});
      const auto of_rank = [&](const at::Tensor& whole) {
        return whole.detach()
            .narrow(0, from, c.rows_of_rank[number])
            .reshape(parts[number].sizes());
      };
      at::Tensor mine = parts[number].to(device).contiguous(c.format).set_requires_grad(true);
      const at::Tensor dy = of_rank(dy_all).to(c.type).to(device);
      const int before = ReadBacks(device);
      const at::Tensor y = norm->forward(mine);
      y.backward(dy);
      const bool alone = c.rows_of_rank.size() == 1;  // then it is LibTorch's
      EXPECT_TRUE(alone || ReadBacks(device) == before);
      EXPECT_EQ(y.device(), device);
      EXPECT_EQ(y.scalar_type(), c.type);
      EXPECT_TRUE(y.is_contiguous(c.format));
      EXPECT_LT(Far(y, of_rank(y_all)), c.close);
      EXPECT_LT(Far(mine.grad(), of_rank(all.grad())), c.close);
      for (auto [own, expected] :
           {std::pair(norm->weight, joined->weight), std::pair(norm->bias, joined->bias)}) {
        if (!expected.defined()) continue;
        const at::Tensor sum = allreduce(own.grad().cpu(), AllreduceOptions().op(ReduceOp::Sum));
        EXPECT_LT(Far(sum, expected.grad()), 100 * c.close);
        own.mutable_grad().reset();
        expected.mutable_grad().reset();
      }
      EXPECT_LT(Far(norm->running_mean, joined->running_mean), c.close);
      EXPECT_LT(Far(norm->running_var, joined->running_var), c.close);
      if (joined->num_batches_tracked.defined()) {
        EXPECT_TRUE(norm->num_batches_tracked.cpu().equal(joined->num_batches_tracked));
      }
    }
  }
};

TEST_F(GpuSyncBatchNormTest, TwoAndThreeRanksFollowTheJoinedBatch) {
  ExpectFollowsJoinedBatch({{5, 5}});
  ExpectFollowsJoinedBatch({{4, 4}, {6}});
  ExpectFollowsJoinedBatch({{4, 4, 4}, {3, 2}});
  ExpectFollowsJoinedBatch({{4, 4}, {3, 2, 4}});
}

TEST_F(GpuSyncBatchNormTest, BatchesMayDifferInSizeAndBeEmpty) {
  ExpectFollowsJoinedBatch({{1, 7, 2}, {3, 3}});
  ExpectFollowsJoinedBatch({{0, 6}, {2}});
  ExpectFollowsJoinedBatch({{6, 0, 1}, {3, 3}});
}

TEST_F(GpuSyncBatchNormTest, KeepsTheChannelsLast) {
  ExpectFollowsJoinedBatch(
      {{3, 2}, {4, 5}, BatchNormOptions(kChannels), c10::MemoryFormat::ChannelsLast});
}

TEST_F(GpuSyncBatchNormTest, TakesEveryOption) {
  const BatchNormOptions base(kChannels);
  for (const BatchNormOptions& options :
       {BatchNormOptions(base).affine(false), BatchNormOptions(base).eps(0.5).momentum(0.7),
        BatchNormOptions(base).momentum(std::nullopt),
        BatchNormOptions(base).track_running_stats(false),
        BatchNormOptions(base).momentum(std::nullopt).track_running_stats(false).affine(false)}) {
    ExpectFollowsJoinedBatch({{3, 4}, {2, 3}, options});
  }
}

TEST_F(GpuSyncBatchNormTest, HalfTypesComputeInFloat32) {
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    for (const auto module_type : {at::kFloat, type}) {
      Case c{{4, 3}, {2}};
      c.type = type;
      c.module_type = module_type;
      c.close = type == at::kHalf ? 2e-2 : 1e-1;
      ExpectFollowsJoinedBatch(c);
    }
  }
}

TEST_F(GpuSyncBatchNormTest, WhatHalfTypesCannotCountIsCountedAllTheSame) {
  Case c{{2, 2}, {70000}, BatchNormOptions(kChannels).track_running_stats(false).affine(false)};
  c.type = at::kHalf;
  c.module_type = at::kHalf;
  c.close = 2e-2;
  ExpectFollowsJoinedBatch(c);
}

TEST_F(GpuSyncBatchNormTest, ALoneRankIsABatchNorm) { ExpectFollowsJoinedBatch({{5}, {2}}); }

TEST_F(GpuSyncBatchNormTest, TheHostHereAndAGpuThereIsAMismatch) {
  RunRanks(2, [](GpuRank& rank) {
    const at::Device device = rank.number() == 0 ? Cuda(rank.device()) : at::Device(at::kCPU);
    SyncBatchNorm norm(BatchNormOptions{kChannels});
    norm->to(device);
    const std::string text = ErrorOf(ErrorCode::Mismatch, [&] {
      norm->forward(torch::ones({2, kChannels}).to(device));
    });
    EXPECT_THAT(text, HasSubstr("sync_batch_norm/#1"));
    EXPECT_THAT(text, HasSubstr("a group of 2 tensors on rank 0"));
  });
}

TEST_F(GpuSyncBatchNormTest, AModuleElsewhereIsToldToAll) {
  RunRanks(2, [](GpuRank& rank) {
    SyncBatchNorm norm(BatchNormOptions(kChannels).affine(false));
    if (rank.number() == 0) norm->to(Cuda(rank.device()));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          norm->forward(torch::ones({2, kChannels}).to(Cuda(rank.device())));
                        }),
                HasSubstr("the input is on cuda:2, but the module is on cpu"));
  });
}

TEST_F(GpuSyncBatchNormTest, BackwardOfDifferentCallsIsNoticed) {
  RunRanks(2, [](GpuRank& rank) {
    SyncBatchNorm norm(BatchNormOptions{kChannels});
    norm->to(Cuda(rank.device()));
    at::Tensor x = Input(3, {}, 1, 0).to(at::kFloat).to(Cuda(rank.device()));
    x.set_requires_grad(true);
    // So many that the first and the last have one name.
    std::vector<at::Tensor> results;
    for (int i = 0; i < 17; ++i) results.push_back(norm->forward(x));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          results[rank.number() == 0 ? 0 : 16].backward(
                              torch::ones({3, kChannels}).to(Cuda(rank.device())));
                        }),
                HasSubstr("backward() of different calls"));
  });
}

}  // namespace
}  // namespace sirtaki::tests
