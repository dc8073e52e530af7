// Shards of gradients and of an optimizer's state on GPUs, which are fakes: what the parameters are,
// and what NCCL is asked for.
#include <ATen/ops/empty.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "sirtaki/torch.h"
#include "tests/support/device_ranks.h"
#include "tests/torch/gpu/given_gradients.h"
#include "tests/torch/gpu/gpu_ranks.h"

namespace sirtaki::tests {
namespace {

using ::testing::IsEmpty;
using ::testing::Not;

class GpuShardedGradientsTest : public GpuRanksTest {
 protected:
  // Trains on so many ranks; the parameters of the last rank, by name.
  std::map<std::string, Floats> Train(int size, const DistributedOptimizerOptions& options) {
    std::map<std::string, Floats> trained;
    RunRanks(size, [&](GpuRank& rank) {
      GivenGradients model;
      const ops::cuda::StreamHandle backward = gpus_.MakeStream();
      model.Add("even", {32, 12}, Cuda(rank.device()), backward);  // on 2, 3 and 4 ranks
      model.Add("uneven", {250}, Cuda(rank.device()), backward);
      model.Add("small", {5}, Cuda(rank.device()), backward);
      model.Add("unused", {100}, Cuda(rank.device()), backward);
      auto optimizer = model.Wrap(options);
      for (int step = 0; step < 5; ++step) {
        optimizer.zero_grad();
        std::mt19937 random(static_cast<unsigned>(10 * step + rank.number()));
        std::vector<GivenGradients::Gradient> gradients;
        for (const auto& [name, parameter] : model.named()) {
          // One that a rank, or all of them, have not used.
          if (name == "unused" && (step % 2 == 0 || rank.number() == 0)) continue;
          GivenGradients::Gradient& gradient = gradients.emplace_back();
          gradient.name = name;
          for (std::int64_t i = 0; i < parameter.numel(); ++i) {
            gradient.elements.push_back(static_cast<float>(random()) / 1e9F);
          }
        }
        model.Backward(gradients);
        optimizer.step();
      }
      for (const auto& [name, parameter] : model.named()) {
        Floats values = rank.Read(parameter.detach());
        if (rank.number() == size - 1) trained[name] = std::move(values);
      }
    });
    return trained;
  }
};

TEST_F(GpuShardedGradientsTest, AreReducedAndScatteredToTheSameParameters) {
  for (const int size : {2, 3}) {
    SCOPED_TRACE(std::to_string(size) + " ranks");
    const auto whole = Train(size, {});
    EXPECT_THAT(gpus_.calls("ncclReduceScatter"), IsEmpty());
    gpus_.Forget();
    EXPECT_EQ(Train(size, DistributedOptimizerOptions().shard(Shard::Gradients)), whole);
    // From the second step on there are buckets.
    EXPECT_GE(gpus_.calls("ncclReduceScatter rank 0").size(), 4u);
    EXPECT_THAT(gpus_.calls("ncclSend rank 0"), Not(IsEmpty()));
    gpus_.Forget();
  }
}

TEST_F(GpuShardedGradientsTest, AreReducedAsAWholeWhereARankNeedsIt) {
  const auto whole = Train(2, {});
  gpus_.Forget();
  EXPECT_EQ(Train(2, DistributedOptimizerOptions().shard(Shard::OptimizerState)), whole);
  EXPECT_THAT(gpus_.calls("ncclReduceScatter"), IsEmpty());
  configure_ = [](core::Config& config) { config.deterministic = true; };
  EXPECT_EQ(Train(2, DistributedOptimizerOptions().shard(Shard::Gradients)), whole);
  EXPECT_THAT(gpus_.calls("ncclReduceScatter"), IsEmpty());
}

}  // namespace
}  // namespace sirtaki::tests
