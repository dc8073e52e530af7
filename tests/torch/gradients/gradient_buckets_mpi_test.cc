// RANKS: 3
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

constexpr int kSteps = 10;

// Float32, whose last bits depend on the order in which three ranks are added up. From step
// `resumed` on by an optimizer that has just been made.
std::vector<torch::Tensor> Train(bool deterministic, bool shared_memory, std::uint32_t seed,
                                 const std::string& bucket_bytes = "8K", int width = 37,
                                 int resumed = kSteps) {
  init(InitOptions()
           .set("deterministic", deterministic ? "true" : "false")
           .set("shared_memory", shared_memory ? "auto" : "off")
           .set("first_bucket_bytes", "1K")
           .set("bucket_bytes", bucket_bytes));
  std::mt19937 random(seed + static_cast<std::uint32_t>(rank()));
  std::vector<torch::Tensor> result;
  {
    torch::nn::Sequential net;
    torch::NoGradGuard no_grad;
    for (int i = 0; i < 4; ++i) {
      torch::nn::Linear layer(width, width);
      layer->weight.copy_(0.2 * Waves({width, width}, i));
      layer->bias.copy_(Waves({width}, i));
      net->push_back(layer);
      net->push_back(torch::nn::Tanh());
    }
    torch::AutoGradMode grad(true);
    std::optional<DistributedOptimizer<torch::optim::SGD>> optimizer;
    for (int step = 0; step < kSteps; ++step) {
      if (step == 0 || step == resumed) {
        optimizer.emplace(torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1)),
                          net->named_parameters());
      }
      optimizer->zero_grad();
      const auto x = Waves({5, width}, 10.0 * step + rank()).to(torch::kFloat);
      const auto loss = net->forward(x).pow(2).mean();
      // The ranks come at another time in each run.
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      loss.backward();
      optimizer->step();
    }
    for (const auto& parameter : net->parameters()) result.push_back(parameter.detach().clone());
  }
  shutdown();
  return result;
}

TEST(GradientBucketsTest, ThreeRunsGiveTheSameBits) {
  // In shared memory a sum's order is that of the ranks, whatever is reduced together.
  for (const auto& [deterministic, shared_memory] :
       std::vector<std::pair<bool, bool>>{{true, false}, {true, true}, {false, true}}) {
    const auto first = Train(deterministic, shared_memory, 1);
    for (std::uint32_t run = 2; run <= 3; ++run) {
      const auto again = Train(deterministic, shared_memory, 100 * run);
      for (std::size_t i = 0; i < first.size(); ++i) {
        EXPECT_EQ(std::memcmp(first[i].data_ptr(), again[i].data_ptr(), first[i].nbytes()), 0)
            << "parameter " << i << " in run " << run << ", deterministic: " << deterministic
            << ", shared memory: " << shared_memory;
      }
    }
  }
}

// The first step of an optimizer has no buckets, so a resumed run adds up in another order there
// than one that was not stopped; unless neither has any.
TEST(GradientBucketsTest, AResumedRunGivesTheSameBitsWhereNoneOfBothHasBuckets) {
  constexpr int kWidth = 97;  // 37 KB, which go round in a ring
  const auto train = [](int resumed) {
    return Train(/*deterministic=*/true, /*shared_memory=*/false, 1, "0", kWidth, resumed);
  };
  const auto whole = train(kSteps);
  const auto resumed = train(kSteps / 2);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    EXPECT_TRUE(resumed[i].equal(whole[i])) << "parameter " << i;
  }
}

}  // namespace
}  // namespace sirtaki::tests
