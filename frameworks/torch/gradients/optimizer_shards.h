// The shards of a sharded optimizer: which rank makes the step of which part of each parameter, and
// keeps the state for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "frameworks/torch/session/session_set.h"
#include "sirtaki/optimizer_options.h"

namespace sirtaki::detail {

// What ShardBy::Auto comes to for this optimizer, which is of Base's own class.
ShardBy ChooseShardBy(const torch::optim::Optimizer& optimizer);
// Why the state of this optimizer cannot be sharded; empty if it can.
std::string WhyNotSharded(const torch::optim::Optimizer& optimizer);

// The first element of each rank's shard of a parameter, and the end of the last one. A shard begins
// at a multiple of 128 bytes: LibTorch's kernels take two vectors of up to 64 bytes at a time, and
// what is left at the end one by one, which may round otherwise. A parameter with fewer bytes than
// that for each rank belongs to rank `least`, as all do by Parameter.
std::vector<std::int64_t> CutShards(std::int64_t elements, std::int64_t element_bytes, int ranks,
                                    int least, ShardBy by);

// Belongs to one optimizer, and is used by the thread that uses it.
class OptimizerShards {
 public:
  // `what`: "parameters of the optimizer #2"; the name of the gather has it. `by`: not Auto.
  OptimizerShards(SessionSet set, std::string what, ShardBy by);

  // Makes a step in which the optimizer has this rank's shards in the place of its parameters, and
  // then gives all ranks the shards of all. The step of a rank that throws is an error on every
  // rank. Collective.
  void Step(torch::optim::Optimizer& optimizer, const std::function<void()>& base_step);
  // Whether the state that the optimizer has is that of shards, which a step has made. State that
  // was loaded since is not.
  bool HaveCut(const torch::optim::Optimizer& optimizer) const;

 private:
  struct Shards {
    at::Tensor parameter;
    std::vector<std::int64_t> cuts;
    at::Tensor mine;  // not defined: this rank has none of it
  };

  Shards& ShardsOf(const at::Tensor& parameter);
  void TakeState(torch::optim::Optimizer& optimizer, const Shards& shards) const;
  void Forget(torch::optim::Optimizer& optimizer);
  void Gather(const std::vector<Shards*>& stepped, const std::string& error) const;

  const SessionSet set_;
  const std::string what_;
  const ShardBy by_;
  std::unordered_map<const void*, Shards> shards_;  // by parameter
  std::vector<std::int64_t> elements_;              // that each rank has
};

}  // namespace sirtaki::detail
