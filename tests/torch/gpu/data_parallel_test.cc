// DistributedDataParallel of a model with buffers on a GPU, which is a fake.
#include "sirtaki/data_parallel.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

#include "tests/torch/gpu/gpu_ranks.h"

namespace sirtaki::tests {
namespace {

class GpuDataParallelTest : public GpuRanksTest {};

// Counts forward passes, and adds up what goes through it.
struct Counting : torch::nn::Module {
  explicit Counting(at::Device device) {
    weight = register_parameter("weight", torch::ones({1}).to(device));
    passes = register_buffer("passes", torch::zeros({1}, torch::kLong).to(device));
    sum = register_buffer("sum", torch::zeros({1}).to(device));
  }
  torch::Tensor forward(float step) {
    const at::NoGradGuard no_grad;
    passes.add_(1);
    sum.add_(step);
    return sum * 1;
  }
  torch::Tensor weight;
  torch::Tensor passes;
  torch::Tensor sum;
};

TEST_F(GpuDataParallelTest, BuffersAreThoseOfRankZeroBeforeEachForward) {
  RunRanks(2, [&](GpuRank& rank) {
    auto net = std::make_shared<Counting>(Cuda(rank.device()));
    if (rank.number() == 1) net->passes.fill_(100);
    DistributedDataParallel<Counting> model(net);
    for (int step = 0; step < 3; ++step) {
      const int before = ReadBacks(Cuda(rank.device()));
      const auto marked = Marked(rank.stream());
      const at::Tensor sum = model.forward(static_cast<float>(1 + rank.number()));
      EXPECT_EQ(ReadBacks(Cuda(rank.device())), before) << "the host does not wait";
      EXPECT_EQ(Marked(rank.stream()), marked + 1) << "one call for all buffers";
      EXPECT_EQ(sum.cpu().item<float>(), static_cast<float>(step + 1 + rank.number()));
      EXPECT_EQ(net->passes.cpu().item<std::int64_t>(), step + 1);
    }
  });
}

}  // namespace
}  // namespace sirtaki::tests
