// Each form of a collective takes a list of tensors as one operation.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "sirtaki/collectives.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

TEST(TensorListTest, EachFormTakesOne) {
  RunTorchRanks(2, [](int rank, const Session& session) {
    std::vector<torch::Tensor> pair = {torch::full({2}, rank + 1.0), torch::ones({4, 2})};
    const auto sum = AllreduceOptions().name("list").op(ReduceOp::Sum);
    EXPECT_EQ(allreduce(pair, sum, session)[0][0].item<double>(), 3);
    EXPECT_EQ(allreduce({pair[0], pair[1]}, sum, session)[1][0][0].item<double>(), 2);
    const at::TensorList last(pair.data() + 1, 1);
    EXPECT_EQ(allreduce(last, sum, session).size(), 1U);
    const ReduceOptions total = ReduceOptions().op(ReduceOp::Sum);
    const auto reduced = reduce(pair, 0, total, session);
    EXPECT_EQ(reduced[0][0].item<double>(), rank == 0 ? 3 : 2);
    EXPECT_EQ(reducescatter(pair, ReducescatterOptions(), session)[1].size(0), 2);
    EXPECT_EQ(broadcast(pair, 1, {}, session)[0][0].item<double>(), 2);
    EXPECT_EQ(allgather(pair, {}, session)[0].size(0), 4);
    EXPECT_EQ(allgather_into(pair, {}, session)[1].size(0), 8);
    EXPECT_EQ(gather(pair, 0, {}, session)[1].size(0), rank == 0 ? 8 : 0);
    EXPECT_EQ(scatter(pair, 0, {}, session)[1].size(0), 2);
    EXPECT_EQ(alltoall(pair, {}, session)[1].received_splits, (std::vector<std::int64_t>{2, 2}));
    EXPECT_EQ(reducescatter_async(pair, ReducescatterOptions(), session).results().size(), 2U);
    EXPECT_EQ(reduce_async(pair, 0, total, session).results().size(), 2U);
    EXPECT_EQ(allgather_async(pair, {}, session).results()[0].size(0), 4);
    EXPECT_EQ(allgather_into_async(pair, {}, session).results()[0].size(0), 4);
    EXPECT_EQ(gather_async(pair, 1, {}, session).results()[0].size(0), rank == 1 ? 4 : 0);
    EXPECT_EQ(scatter_async(pair, 1, {}, session).results()[0].size(0), 1);
    EXPECT_EQ(alltoall_async(pair, {}, session).results()[0].size(0), 2);
    EXPECT_EQ(broadcast_async(pair, 1, {}, session).results()[0][0].item<double>(), 2);

    reduce_async_(pair, 0, total, session).wait();
    EXPECT_EQ(pair[0][0].item<double>(), rank == 0 ? 3 : 2);
    EXPECT_TRUE(reduce_(pair, 1, total, session)[0].is_same(pair[0]));
    EXPECT_TRUE(broadcast_(pair, 0, {}, session)[0].is_same(pair[0]));
    broadcast_async_(pair, 0, {}, session).wait();
    EXPECT_EQ(pair[0][0].item<double>(), 3);
    EXPECT_TRUE(allreduce_(pair, sum, session)[0].is_same(pair[0]));
    allreduce_async_(pair, sum, session).wait();
    EXPECT_EQ(pair[0][0].item<double>(), 12);
  });
}

}  // namespace
}  // namespace sirtaki::tests
