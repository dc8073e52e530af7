// Each form of a collective takes a list of tensors as one operation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "sirtaki/collectives.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

TEST(TensorListTest, EachFormTakesOne) {
  RunTorchRanks(2, [](int rank) {
    std::vector<torch::Tensor> pair = {torch::full({2}, rank + 1.0), torch::ones({4, 2})};
    const auto sum = AllreduceOptions().name("list").op(ReduceOp::Sum);
    EXPECT_EQ(allreduce(pair, sum)[0][0].item<double>(), 3);
    EXPECT_EQ(allreduce({pair[0], pair[1]}, sum)[1][0][0].item<double>(), 2);
    const at::TensorList last(pair.data() + 1, 1);
    EXPECT_EQ(allreduce(last, sum).size(), 1U);
    const ReduceOptions total = ReduceOptions().op(ReduceOp::Sum);
    const auto reduced = reduce(pair, 0, total);
    EXPECT_EQ(reduced[0][0].item<double>(), rank == 0 ? 3 : 2);
    EXPECT_EQ(reducescatter(pair, ReducescatterOptions())[1].size(0), 2);
    EXPECT_EQ(broadcast(pair, 1)[0][0].item<double>(), 2);
    EXPECT_EQ(allgather(pair)[0].size(0), 4);
    EXPECT_EQ(allgather_into(pair)[1].size(0), 8);
    EXPECT_EQ(gather(pair, 0)[1].size(0), rank == 0 ? 8 : 0);
    EXPECT_EQ(scatter(pair, 0)[1].size(0), 2);
    EXPECT_EQ(alltoall(pair)[1].received_splits, (std::vector<std::int64_t>{2, 2}));
    EXPECT_EQ(reducescatter_async(pair, ReducescatterOptions()).results().size(), 2U);
    EXPECT_EQ(reduce_async(pair, 0, total).results().size(), 2U);
    EXPECT_EQ(allgather_async(pair).results()[0].size(0), 4);
    EXPECT_EQ(allgather_into_async(pair).results()[0].size(0), 4);
    EXPECT_EQ(gather_async(pair, 1).results()[0].size(0), rank == 1 ? 4 : 0);
    EXPECT_EQ(scatter_async(pair, 1).results()[0].size(0), 1);
    EXPECT_EQ(alltoall_async(pair).results()[0].size(0), 2);
    EXPECT_EQ(broadcast_async(pair, 1).results()[0][0].item<double>(), 2);

    reduce_async_(pair, 0, total).wait();
    EXPECT_EQ(pair[0][0].item<double>(), rank == 0 ? 3 : 2);
    EXPECT_TRUE(reduce_(pair, 1, total)[0].is_same(pair[0]));
    EXPECT_TRUE(broadcast_(pair, 0)[0].is_same(pair[0]));
    broadcast_async_(pair, 0).wait();
    EXPECT_EQ(pair[0][0].item<double>(), 3);
    EXPECT_TRUE(allreduce_(pair, sum)[0].is_same(pair[0]));
    allreduce_async_(pair, sum).wait();
    EXPECT_EQ(pair[0][0].item<double>(), 12);
  });
}

TEST(TensorListTest, BracesAreOneHoweverManyTheyHold) {
  RunTorchRanks(2, [](int rank) {
    const auto mine = torch::full({2}, rank + 1.0);
    const std::vector<torch::Tensor> one = allreduce({mine}, AllreduceOptions().op(ReduceOp::Sum));
    EXPECT_EQ(one.at(0)[1].item<double>(), 3);
    const auto empty = [](const std::function<void()>& call) {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, call),
                  testing::HasSubstr("the list of tensors is empty"));
    };
    empty([] { allreduce({}); });
    empty([] { allreduce_({}, {}); });
    empty([] { reduce_async({}, 0).wait(); });
    empty([] { broadcast({}, 0); });
    empty([] { alltoall({}); });
    empty([] { grouped_allgather({}); });
  });
}

}  // namespace
}  // namespace sirtaki::tests
