// A run whose optimizer may be in shards, for checkpoints.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "sirtaki/checkpoint.h"
#include "sirtaki/optimizer.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {

inline DistributedOptimizerOptions OptionsOf(bool sharded) {
  return DistributedOptimizerOptions().shard(sharded ? Shard::OptimizerState : Shard::None);
}

// All ranks have the same gradients, so that the number of ranks does not count.
struct ShardedRun {
  explicit ShardedRun(bool sharded, const ProcessSet& set = {})
      : optimizer(DistributedOptimizer(
            torch::optim::AdamW(net.parameters(), torch::optim::AdamWOptions(0.05).amsgrad(true)),
            net.named_parameters(), OptionsOf(sharded).process_set(set))) {}

  Checkpoint checkpoint() { return Checkpoint().model(net).optimizer(optimizer).epoch(steps); }

  void TrainUntil(std::int64_t until) {
    for (; steps < until; ++steps) {
      optimizer.zero_grad();
      Loss(net, BatchOfRank(static_cast<int>(steps), 0)).backward();
      optimizer.step();
    }
  }

  SmallNet net;
  DistributedOptimizer<torch::optim::AdamW> optimizer;
  std::int64_t steps = 0;
};

inline std::vector<std::string> FilesBeside(const std::string& file) {
  std::vector<std::string> names;
  const auto folder = std::filesystem::path(file).parent_path();
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

}  // namespace sirtaki::tests
