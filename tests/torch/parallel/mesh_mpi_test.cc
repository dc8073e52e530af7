// RANKS: 1 2 4
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

namespace sirtaki::tests {
namespace {

TEST(MeshMpiTest, RowsAreSetsAndCanBeRemoved) {
  init();
  const int pipe = std::min(size(), 2);
  const Mesh grid = mesh({{"data", -1}, {"pipe", pipe}, {"tensor", 1}});
  EXPECT_EQ(grid.size("data"), size() / pipe);
  EXPECT_EQ(grid.coordinate("data"), rank() / pipe);
  EXPECT_EQ(grid.coordinate("pipe"), rank() % pipe);
  EXPECT_EQ(grid.coordinate("tensor"), 0);
  for (const char* axis : {"data", "pipe", "tensor"}) {
    const std::vector<int>& row = grid.ranks(axis);
    double expected = 0;
    for (const int member : row) expected += member;
    EXPECT_EQ(row[static_cast<std::size_t>(grid.coordinate(axis))], rank());
    const auto sum = allreduce(torch::full({3}, 1.0 * rank()),
                               AllreduceOptions().op(ReduceOp::Sum).process_set(grid.set(axis)));
    EXPECT_EQ(sum[2].item<double>(), expected) << axis;
  }
  for (const MeshAxis& axis : grid.axes()) {
    for (const ProcessSet& row : grid.sets(axis.name)) remove_process_set(row);
  }
  EXPECT_THROW(barrier(BarrierOptions().process_set(grid.set("data"))), Error);
  shutdown();
}

}  // namespace
}  // namespace sirtaki::tests
