// RANKS: 3
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

// Float32, whose last bits depend on the order in which three ranks are added up.
std::vector<torch::Tensor> Train(bool deterministic, bool shared_memory, std::uint32_t seed) {
  init(InitOptions()
           .set("deterministic", deterministic ? "true" : "false")
           .set("shared_memory", shared_memory ? "auto" : "off")
           .set("first_bucket_bytes", "1K")
           .set("bucket_bytes", "8K"));
  std::mt19937 random(seed + static_cast<std::uint32_t>(rank()));
  std::vector<torch::Tensor> result;
  {
    torch::nn::Sequential net;
    torch::NoGradGuard no_grad;
    for (int i = 0; i < 4; ++i) {
      torch::nn::Linear layer(37, 37);
      layer->weight.copy_(0.2 * Waves({37, 37}, i));
      layer->bias.copy_(Waves({37}, i));
      net->push_back(layer);
      net->push_back(torch::nn::Tanh());
    }
    torch::AutoGradMode grad(true);
    auto optimizer = DistributedOptimizer(
        torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)),
        net->named_parameters());
    for (int step = 0; step < 10; ++step) {
      optimizer.zero_grad();
      const auto x = Waves({5, 37}, 10.0 * step + rank()).to(torch::kFloat);
      const auto loss = net->forward(x).pow(2).mean();
      // The ranks come at another time in each run.
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      loss.backward();
      optimizer.step();
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

}  // namespace
}  // namespace sirtaki::tests
