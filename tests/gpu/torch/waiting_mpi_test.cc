// RANKS: 2
// Calls that only launch return while the GPU is still busy with what came before. Skips with a
// reason where there is no GPU.
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include "tests/gpu/torch/gpu_rank.h"

namespace sirtaki::tests {
namespace {

class GpuWaitingTest : public GpuRankTest {
 protected:
  // Puts into the current stream what takes the GPU long, whatever it is, and ends with an event.
  struct Busy {
    explicit Busy(const torch::Device& device)
        : end(device.type(), c10::EventFlag::BACKEND_DEFAULT) {
      const torch::Tensor square = torch::eye(8192, device) * 0.5;
      torch::Tensor power = square;
      for (int i = 0; i < 8; ++i) power = torch::mm(power, square) * 2;
      const c10::impl::VirtualGuardImpl guard(device.type());
      end.record(guard.getStream(device));
    }
    bool is_over() const { return end.query(); }
    c10::Event end;
  };
};

TEST_F(GpuWaitingTest, GathersOfRowsThatDiffer) {
  for (int round = 0; round < 2; ++round) {
    const torch::Tensor mine = torch::full({3 + rank(), 1000}, rank(), device());
    torch::cuda::synchronize();
    barrier();
    const Busy busy(device());
    const torch::Tensor all = allgather(mine, AllgatherOptions().name("rows"));
    const AlltoallResult dealt =
        alltoall(mine, AlltoallOptions().name("dealt").splits({1, 2 + rank()}));
    // The first round makes the communicator, for which the lane may wait.
    EXPECT_TRUE(round == 0 || !busy.is_over());
    EXPECT_EQ(all.size(0), 7);
    EXPECT_EQ(all.sum().item<double>(), 4000);
    EXPECT_EQ(dealt.tensor.size(0), rank() == 0 ? 2 : 5);
  }
}

TEST_F(GpuWaitingTest, StepsOfShardedOptimizers) {
  for (const Shard shard : {Shard::None, Shard::OptimizerState, Shard::Gradients}) {
    torch::nn::Linear layer(1024, 1024);
    layer->to(device());
    auto optimizer = DistributedOptimizer<torch::optim::Adam>(
        torch::optim::Adam(layer->parameters(), torch::optim::AdamOptions(0.01)),
        layer->named_parameters(), DistributedOptimizerOptions().shard(shard));
    const torch::Tensor input = torch::ones({8, 1024}, device());
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      torch::cuda::synchronize();
      barrier();
      const Busy busy(device());
      layer->forward(input).square().mean().backward();
      optimizer.step();
      // Arenas and communicators are made in the first steps.
      EXPECT_TRUE(step < 4 || !busy.is_over()) << static_cast<int>(shard);
    }
  }
}

TEST_F(GpuWaitingTest, SplitLayersAndTheirLoss) {
  ColumnParallelLinear column(ColumnParallelLinearOptions(64, 100).gather_output(true));
  ColumnParallelLinear classes(ColumnParallelLinearOptions(100, 31));
  ParallelCrossEntropy loss{ParallelCrossEntropyOptions(31)};
  column->to(device());
  classes->to(device());
  const torch::Tensor input = torch::ones({8, 64}, device());
  const torch::Tensor targets = torch::arange(8).to(device());
  for (int step = 0; step < 3; ++step) {
    torch::cuda::synchronize();
    barrier();
    const Busy busy(device());
    const torch::Tensor found = loss(classes(column(input)), targets);
    EXPECT_TRUE(step < 2 || !busy.is_over()) << "forward";
    found.backward();
    EXPECT_TRUE(step < 2 || !busy.is_over()) << "backward";
    EXPECT_GT(found.item<double>(), 0);
  }
}

}  // namespace
}  // namespace sirtaki::tests
