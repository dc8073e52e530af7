// What asks for other ranks in a job of one, with parameters on a GPU, which is a fake.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sirtaki/torch.h"
#include "tests/torch/gpu/given_gradients.h"
#include "tests/torch/gpu/gpu_ranks.h"

namespace sirtaki::tests {
namespace {

class GpuLoneRankTest : public GpuRanksTest {};

TEST_F(GpuLoneRankTest, SparseAsDenseHasNothingToDoWithDenseGradients) {
  RunRanks(1, [&](GpuRank& rank) {
    GivenGradients model;
    model.Add("w", {3}, Cuda(rank.device()), rank.stream());
    auto optimizer = model.Wrap(DistributedOptimizerOptions().sparse_as_dense(true));
    for (int step = 1; step <= 2; ++step) {
      optimizer.zero_grad();
      model.Backward({{"w", 2, {}}});
      optimizer.step();
      EXPECT_EQ(rank.Read(model["w"].detach()), Floats(3, -2.0F * static_cast<float>(step)));
    }
  });
  EXPECT_THAT(gpus_.calls("nccl"), ::testing::IsEmpty());
}

}  // namespace
}  // namespace sirtaki::tests
