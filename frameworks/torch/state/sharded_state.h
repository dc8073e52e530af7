// The state of a sharded optimizer, to and from archives: each rank saves what it has of its
// shards, and whoever loads makes the state of whole parameters of what all have saved.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace sirtaki::detail {

// Returns the elements of a dense tensor in the order in which the parameter's lie in memory: the
// tensor's own memory if that has the parameter's strides, else a copy.
at::Tensor FlatLike(const at::Tensor& parameter, at::Tensor tensor);

// A shard is some of a parameter's elements, which follow each other in memory.
struct ShardRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

// InPlaceOfParameters lets an optimizer have others in the place of its parameters until it ends: a
// list for each group.
class InPlaceOfParameters {
 public:
  InPlaceOfParameters(torch::optim::Optimizer& optimizer,
                      std::vector<std::vector<at::Tensor>> others);
  ~InPlaceOfParameters();
  InPlaceOfParameters(const InPlaceOfParameters&) = delete;
  InPlaceOfParameters& operator=(const InPlaceOfParameters&) = delete;

 private:
  void Swap();

  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> others_;
};

// SaveShards saves the state of this rank's shards, which are in the place of the parameters.
// `ranges`: for each place of a parameter in the groups, what this rank has of it.
void SaveShards(torch::optim::Optimizer& optimizer, std::vector<std::vector<at::Tensor>> shards,
                const std::vector<ShardRange>& ranges, torch::serialize::OutputArchive& archive);

// ShardsOfAllRanks makes the state of whole parameters of what all ranks have saved. The optimizer's
// own is used meanwhile; what throws, which is std::runtime_error or what LibTorch throws, leaves
// anything there.
class ShardsOfAllRanks {
 public:
  explicit ShardsOfAllRanks(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}

  // Takes what SaveShards has written on one rank.
  void Add(torch::serialize::InputArchive& archive);
  // Gives the optimizer what was added. Throws if something is missing.
  void Finish();

 private:
  struct Whole {
    at::Tensor parameter;
    std::unique_ptr<torch::optim::OptimizerParamState> state;
    std::int64_t in_ranges = 0;   // elements
    std::int64_t with_state = 0;  // of these
  };
  void Merge(Whole& whole, const ShardRange& range,
             std::unique_ptr<torch::optim::OptimizerParamState> state);

  torch::optim::Optimizer& optimizer_;
  std::unordered_map<const void*, Whole> wholes_;  // by parameter
};

}  // namespace sirtaki::detail
