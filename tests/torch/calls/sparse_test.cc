#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "sirtaki/collectives.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Row `rank` and row 3 of [5, 2], of which row 3 twice: not coalesced.
torch::Tensor RowsOf(int rank, torch::ScalarType type = torch::kFloat) {
  const auto indices = torch::tensor({{rank, 3, 3}});
  const auto values = torch::tensor({{1, 2}, {3, 4}, {5, 6}}) * (rank + 1);
  return torch::sparse_coo_tensor(indices, values.to(type), {5, 2});
}

torch::Tensor DenseSum(int size, torch::ScalarType type = torch::kFloat) {
  auto sum = torch::zeros({5, 2}, type);
  for (int rank = 0; rank < size; ++rank) sum += RowsOf(rank, type).to_dense();
  return sum;
}

AllreduceOptions SparseSum(const std::string& name = "") {
  return AllreduceOptions().name(name).op(ReduceOp::Sum);
}

TEST(SparseTest, AddsUpWhatEachRankHas) {
  for (const int size : {1, 2, 3}) {
    RunTorchRanks(size, [size](int rank) {
      for (const auto type : {torch::kFloat, torch::kDouble, torch::kInt, torch::kBFloat16}) {
        const auto sum = sparse_allreduce(RowsOf(rank, type), SparseSum("s"));
        EXPECT_TRUE(sum.is_sparse() && sum.is_coalesced());
        EXPECT_EQ(sum.scalar_type(), type);
        EXPECT_TRUE(torch::equal(sum.to_dense(), DenseSum(size, type)));
      }
      const auto average = allreduce(RowsOf(rank, torch::kDouble));
      EXPECT_TRUE(torch::allclose(average.to_dense(), DenseSum(size, torch::kDouble) / size));
      const Handle handle = allreduce_async(RowsOf(rank), SparseSum().prescale(2).postscale(3));
      const auto scaled = synchronize(handle);
      EXPECT_TRUE(torch::equal(scaled.to_dense(), DenseSum(size) * 6));
      EXPECT_TRUE(synchronize(handle).is_same(scaled));
      EXPECT_TRUE(poll(handle));
      EXPECT_TRUE(
          torch::equal(synchronize(sparse_allreduce_async(RowsOf(rank), SparseSum())).to_dense(),
                       DenseSum(size)));
    });
  }
}

TEST(SparseTest, OneRankMayHaveNothing) {
  RunTorchRanks(2, [](int rank) {
    const auto nothing =
        torch::sparse_coo_tensor(torch::empty({1, 0}, torch::kLong), torch::empty({0, 2}), {5, 2});
    const auto sum = allreduce(rank == 0 ? RowsOf(0) : nothing, SparseSum());
    EXPECT_TRUE(torch::equal(sum.to_dense(), DenseSum(1)));
    EXPECT_EQ(allreduce(nothing, SparseSum())._nnz(), 0);
  });
}

TEST(SparseTest, IntegerAverageTruncatesAndDoesNotWrap) {
  RunTorchRanks(2, [](int rank) {
    const auto of = [](int value) {
      return torch::sparse_coo_tensor(torch::tensor({{1}}), torch::tensor({value}, torch::kInt8),
                                      {4});
    };
    EXPECT_EQ(allreduce(of(100 + rank)).to_dense()[1].item<int>(), 100);
    EXPECT_EQ(allreduce(of(-2 - rank)).to_dense()[1].item<int>(), -2);
  });
}

TEST(SparseTest, OnAProcessSet) {
  RunTorchRanks(3, [](int rank) {
    const ProcessSet set = add_process_set({0, 2});
    if (rank == 1) return;
    const auto options = AllreduceOptions().process_set(set);
    const auto average = allreduce(RowsOf(rank, torch::kDouble), options).to_dense();
    EXPECT_TRUE(torch::allclose(
        average, (RowsOf(0, torch::kDouble) + RowsOf(2, torch::kDouble)).to_dense() / 2));
  });
}

TEST(SparseTest, WhatDiffersIsToldOnEveryRank) {
  RunTorchRanks(3, [](int rank) {
    const auto sizes = ErrorOf(ErrorCode::Mismatch, [&] {
      const auto wider =
          torch::sparse_coo_tensor(torch::tensor({{0}}), torch::ones({1, 2}), {6, 2});
      allreduce(rank == 1 ? wider : RowsOf(rank), SparseSum("s"));
    });
    EXPECT_THAT(sizes, AllOf(HasSubstr("\"s\""), HasSubstr("[5, 2]"), HasSubstr("[6, 2]"),
                             HasSubstr("ranks 0, 2"), HasSubstr("rank 1")));
    const auto ops = ErrorOf(ErrorCode::Mismatch, [&] {
      allreduce(RowsOf(rank), SparseSum("s").op(rank == 2 ? ReduceOp::Average : ReduceOp::Sum));
    });
    EXPECT_THAT(ops, AllOf(HasSubstr("sum of sparse"), HasSubstr("average of sparse")));
    ErrorOf(ErrorCode::Mismatch,
            [&] { allreduce(rank == 0 ? RowsOf(rank).to_dense() : RowsOf(rank), SparseSum("s")); });
    EXPECT_TRUE(torch::equal(allreduce(RowsOf(rank), SparseSum("s")).to_dense(), DenseSum(3)));
  });
}

TEST(SparseTest, WhatItCannotDoIsRefusedOnEveryRank) {
  RunTorchRanks(2, [](int rank) {
    const auto refused = [&](const std::function<void()>& call, const std::string& words) {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, call), HasSubstr(words));
    };
    refused([&] { allreduce(RowsOf(rank), SparseSum().op(ReduceOp::Max)); },
            "summed and averaged only");
    refused([&] { allreduce(RowsOf(rank), SparseSum().compression(Compression::F16)); },
            "compressed");
    refused([&] { allreduce(RowsOf(rank, torch::kInt), SparseSum().prescale(2)); }, "int32");
    refused([&] { sparse_allreduce(torch::ones({2}), SparseSum()); }, "layout Strided");
    refused([&] { allreduce(torch::ones({2, 2}).to_sparse_csr(), SparseSum()); }, "SparseCsr");
    refused([&] { allreduce_(RowsOf(rank), SparseSum()); }, "in place");
    refused([&] { broadcast(RowsOf(rank), 0); }, "only dense");
  });
}

}  // namespace
}  // namespace sirtaki::tests
