// Sparse tensors and sparse gradients on GPUs, which are fakes. Threads are the ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "sirtaki/torch.h"
#include "tests/torch/gpu/gpu_ranks.h"
#include "tests/torch/gradients/sparse_training.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

AllreduceOptions SparseSum(const std::string& name = "") {
  return AllreduceOptions().name(name).op(ReduceOp::Sum);
}

// Row `number` and row 3 of [5, 2], of which row 3 twice: not coalesced.
at::Tensor RowsOf(int number, at::Device device, at::ScalarType type = at::kFloat) {
  const auto indices = torch::tensor({{number, 3, 3}}, torch::kLong);
  const auto values = torch::tensor({{1, 2}, {3, 4}, {5, 6}}) * (number + 1);
  return at::_sparse_coo_tensor_unsafe(indices.to(device), values.to(type).to(device), {5, 2});
}

at::Tensor SparseOnHost(const at::Tensor& sparse) {
  return torch::sparse_coo_tensor(sparse._indices().cpu(), sparse._values().cpu(), sparse.sizes())
      .to_dense();
}

at::Tensor DenseSum(int size, at::ScalarType type = at::kFloat) {
  at::Tensor sum = torch::zeros({5, 2}, type);
  for (int number = 0; number < size; ++number) sum += RowsOf(number, at::kCPU, type).to_dense();
  return sum;
}

class GpuSparseTest : public GpuRanksTest {};

TEST_F(GpuSparseTest, AddsUpWhatEachRankHas) {
  for (const int size : {1, 2, 3}) {
    RunRanks(size, [&](GpuRank& rank) {
      const at::Device device = Cuda(rank.device());
      for (const auto type : {at::kFloat, at::kDouble, at::kInt, at::kBFloat16}) {
        const at::Tensor sum =
            sparse_allreduce(RowsOf(rank.number(), device, type), SparseSum("s"));
        EXPECT_TRUE(sum.is_sparse() && sum.is_coalesced());
        EXPECT_EQ(sum.device(), device);
        EXPECT_EQ(sum.scalar_type(), type);
        EXPECT_TRUE(SparseOnHost(sum).equal(DenseSum(size, type))) << SparseOnHost(sum);
      }
      const at::Tensor average = allreduce(RowsOf(rank.number(), device, at::kDouble));
      EXPECT_TRUE(SparseOnHost(average).allclose(DenseSum(size, at::kDouble) / size));
      const at::Tensor scaled =
          allreduce(RowsOf(rank.number(), device), SparseSum().prescale(2).postscale(3));
      EXPECT_TRUE(SparseOnHost(scaled).equal(DenseSum(size) * 6));
    });
  }
}

TEST_F(GpuSparseTest, OneRankMayHaveNothing) {
  RunRanks(2, [&](GpuRank& rank) {
    const at::Device device = Cuda(rank.device());
    const auto nothing = at::_sparse_coo_tensor_unsafe(
        torch::empty({1, 0}, torch::kLong).to(device), torch::empty({0, 2}).to(device), {5, 2});
    const at::Tensor mine = rank.number() == 0 ? RowsOf(0, device) : nothing;
    EXPECT_TRUE(SparseOnHost(allreduce(mine, SparseSum())).equal(DenseSum(1)));
    EXPECT_EQ(allreduce(nothing, SparseSum())._nnz(), 0);
  });
}

TEST_F(GpuSparseTest, TheHostDoesNotWaitBeforeTheEnd) {
  RunRanks(2, [&](GpuRank& rank) {
    const at::Device device = Cuda(rank.device());
    const at::Tensor mine = RowsOf(rank.number(), device);
    const int before = ReadBacks(device);
    const Handle handle = allreduce_async(mine, SparseSum("s"));
    EXPECT_EQ(ReadBacks(device), before);
    const at::Tensor sum = synchronize(handle);
    EXPECT_EQ(ReadBacks(device), before + 1) << "to know how many elements there are";
    // In another stream it is the same one, and there.
    const ops::cuda::StreamHandle other = gpus_.MakeStream();
    SetCurrentStream(rank.device(), other);
    EXPECT_TRUE(synchronize(handle).is_same(sum));
    EXPECT_EQ(ReadBacks(device), before + 1);
    EXPECT_THAT(RecordedOn(sum._values()), Contains(other));
    EXPECT_TRUE(SparseOnHost(sum).equal(DenseSum(2)));
  });
}

TEST_F(GpuSparseTest, WhatDiffersIsToldOnEveryRank) {
  RunRanks(2, [&](GpuRank& rank) {
    const at::Device device = Cuda(rank.device());
    const std::string places = ErrorOf(ErrorCode::Mismatch, [&] {
      allreduce(RowsOf(rank.number(), rank.number() == 0 ? device : at::Device(at::kCPU)),
                SparseSum("s"));
    });
    EXPECT_THAT(places, AllOf(HasSubstr("on a GPU on rank 0"), HasSubstr("on the host on rank 1")));
    const std::string ops = ErrorOf(ErrorCode::Mismatch, [&] {
      allreduce(RowsOf(rank.number(), device),
                SparseSum("s").op(rank.number() == 0 ? ReduceOp::Average : ReduceOp::Sum));
    });
    EXPECT_THAT(ops, AllOf(HasSubstr("sum of sparse"), HasSubstr("average of sparse")));
    EXPECT_TRUE(
        SparseOnHost(allreduce(RowsOf(rank.number(), device), SparseSum("s"))).equal(DenseSum(2)));
  });
}

TEST_F(GpuSparseTest, ACaptureIsRefusedOnAllRanksAndLeftAlone) {
  RunRanks(2, [&](GpuRank& rank) {
    const at::Tensor mine = RowsOf(rank.number(), Cuda(rank.device()));
    if (rank.number() == 1) gpus_.SetCapturing(rank.stream());
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { allreduce(mine, SparseSum("s")); }),
                HasSubstr("CUDA graph"));
    if (rank.number() == 1) gpus_.SetCapturing(rank.stream(), false);
    EXPECT_TRUE(SparseOnHost(allreduce(mine, SparseSum("s"))).equal(DenseSum(2)));
  });
}

// ---- gradients ----

at::Tensor LossOn(at::Device device, torch::nn::Embedding& table, int step, int number) {
  const at::Tensor rows = RowsOfRank(step, number);
  const at::Tensor factors = Waves({rows.size(0), kTableColumns}, 10.0 * number);
  return (table(rows.to(device)) * factors.to(device)).pow(2).sum();
}

TEST_F(GpuSparseTest, AnEmbeddingFollowsOneProcess) {
  using torch::optim::SGD;
  for (const int size : {1, 2, 3}) {
    auto lone = MakeTable(true);
    SGD alone(lone->parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 4; ++step) {
      alone.zero_grad();
      JoinedTableLoss(lone, step, size).backward();
      alone.step();
    }
    RunRanks(size, [&](GpuRank& rank) {
      const at::Device device = Cuda(rank.device());
      auto table = MakeTable(true);
      table->to(device);
      auto optimizer = DistributedOptimizer(SGD(table->parameters(), torch::optim::SGDOptions(0.1)),
                                            table->named_parameters());
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        LossOn(device, table, step, rank.number()).backward();
        optimizer.step();
        ASSERT_TRUE(table->weight.grad().is_sparse());
        EXPECT_EQ(table->weight.grad().device(), device);
      }
      const at::Tensor weight = table->weight.detach().cpu();
      EXPECT_LT((weight - lone->weight).abs().max().item<double>(), 1e-13) << size;
    });
  }
}

// It learns from the others that there is one, and what form it has.
TEST_F(GpuSparseTest, ARankMayHaveNoGradient) {
  using torch::optim::SGD;
  RunRanks(2, [&](GpuRank& rank) {
    const at::Device device = Cuda(rank.device());
    auto table = MakeTable(true);
    auto expected = MakeTable(true);
    table->to(device);
    auto optimizer = DistributedOptimizer(SGD(table->parameters(), torch::optim::SGDOptions(0.1)),
                                          table->named_parameters());
    SGD alone(expected->parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      alone.zero_grad();
      const int has = step == 1 ? 1 : 0;
      (TableLoss(expected, RowsOfRank(step, has), has) / 2).backward();
      alone.step();
      if (rank.number() == has) LossOn(device, table, step, has).backward();
      if (rank.number() != has) optimizer.synchronize();
      optimizer.step();
    }
    const at::Tensor weight = table->weight.detach().cpu();
    EXPECT_LT((weight - expected->weight).abs().max().item<double>(), 1e-13);
  });
}

}  // namespace
}  // namespace sirtaki::tests
