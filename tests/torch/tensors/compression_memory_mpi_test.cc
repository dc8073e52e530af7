// RANKS: 2
// What compression costs in memory: a window of 16-bit elements at a time, not the gradients again.
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <cstdint>

namespace sirtaki::tests {
namespace {

constexpr std::int64_t kMebi = std::int64_t{1} << 20;

// 32 MiB of gradients. The most that was in use since the process has started.
std::int64_t PeakOfTraining(Compression compression) {
  torch::manual_seed(1);
  torch::nn::Sequential net;
  for (int i = 0; i < 8; ++i) net->push_back(torch::nn::Linear(1024, 1024));
  auto optimizer = DistributedOptimizer(
      torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.01)), net->named_parameters(),
      DistributedOptimizerOptions()
          .compression(compression)
          .compression_scope(CompressionScope::Everywhere));
  const auto x = torch::ones({4, 1024});
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    net->forward(x).sum().backward();
    optimizer.step();
  }
  return memory_use().peak_bytes;
}

TEST(CompressionMemoryTest, IsAWindowAtATime) {
  init();
  const std::int64_t plain = PeakOfTraining(Compression::None);
  EXPECT_GE(plain, 64 * kMebi) << "the parameters and the gradients";
  EXPECT_LE(plain, 64 * kMebi + 2 * 4 * kMebi)
      << "and the largest gradient, on its way into its place";
  for (const auto compression : {Compression::F16, Compression::BF16}) {
    EXPECT_LE(PeakOfTraining(compression), plain + 4 * kMebi);
  }
  shutdown();
}

}  // namespace
}  // namespace sirtaki::tests
