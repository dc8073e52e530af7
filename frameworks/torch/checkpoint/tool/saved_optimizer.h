// An optimizer as a checkpoint has it, without the program that has saved it.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/torch/state/sharded_state.h"

namespace sirtaki::detail {

using Items = std::vector<std::pair<std::string, c10::IValue>>;  // by name, in the file's order
Items ItemsOf(torch::serialize::InputArchive& archive);

// A SavedOptimizer is one of LibTorch's classes, with parameters that have the shapes of those that
// it was saved with. It reads its archives as load_checkpoint does. What throws throws
// std::runtime_error or what LibTorch throws.
class SavedOptimizer {
 public:
  // `lines`: what optimizer_parameters has of it.
  explicit SavedOptimizer(std::vector<std::string> lines) : lines_(std::move(lines)) {}

  // Takes the archive of an optimizer that is not sharded.
  void Load(torch::serialize::InputArchive& archive);
  // Takes the archives of all ranks that have shards of it, one after the other.
  void Add(torch::serialize::InputArchive& archive);
  void Finish();
  // Writes what Optimizer::save() of the whole would write, as LoadOptimizer() reads it.
  void Write(torch::serialize::OutputArchive& archive);
  // The state dict of Python's optimizer of the same class.
  c10::IValue StateDict() const;

 private:
  // Throws if LibTorch has no such class. `strides`: of the parameters; empty: nobody asks.
  void Make(const std::vector<std::vector<std::int64_t>>& strides);
  // One of the program's own may have options of LibTorch's, and other state.
  void CheckStates(torch::serialize::InputArchive& archive) const;
  void CheckNeedsNoStrides(torch::serialize::InputArchive& archive) const;

  std::vector<std::string> lines_;
  std::set<std::string> names_;  // of what the class keeps for a parameter
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<ShardsOfAllRanks> shards_;
};

}  // namespace sirtaki::detail
