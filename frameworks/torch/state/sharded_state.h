// The state of a sharded optimizer, to and from archives: each rank saves what it has of its
// shards, and whoever loads makes the state of whole parameters of what all have saved.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "frameworks/torch/state/optimizer_archive.h"
#include "sirtaki/detail/gradient_reducer.h"

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

// The shape of the parameter that a line of DescribeOptimizer() is about; none of a group's line.
std::optional<std::vector<std::int64_t>> SizesInLine(const std::string& line);

// ShardCover adds up which elements of the parameters the shards of the ranks have. It does not need
// the optimizer. What throws throws std::runtime_error.
class ShardCover {
 public:
  // `lines`: what DescribeOptimizer() says.
  explicit ShardCover(const std::vector<std::string>& lines);

  // Returns what an archive that SaveShards has written on one rank has at each place.
  std::vector<ShardRange> RangesOf(torch::serialize::InputArchive& archive) const;
  void Add(const std::vector<ShardRange>& ranges);
  const std::string& line(std::size_t place) const { return places_.at(place).line; }
  // Throws if the shards do not have each element once: two ranks' files may be copies of one.
  void Finish() const;

 private:
  struct Place {
    std::string line;
    std::int64_t elements = 0;
    std::multimap<std::int64_t, std::int64_t> counts_by_begin;
  };
  std::vector<Place> places_;
};

// SavedStrides gives the strides of the parameters that SaveShards has written, by their places; nothing
// of an old archive.
std::vector<std::vector<std::int64_t>> SavedStrides(torch::serialize::InputArchive& archive);

// ShardsOfAllRanks makes the state of whole parameters, or of one rank's shards of them, of what all
// ranks have saved. The optimizer's
// own is used meanwhile; what throws, which is std::runtime_error or what LibTorch throws, leaves
// anything there.
class ShardsOfAllRanks {
 public:
  // `read`: gets the elements of tensors of an archive that was loaded without them.
  using ReadElements = std::function<void(const at::Tensor& from, const at::Tensor& to)>;

  explicit ShardsOfAllRanks(torch::optim::Optimizer& optimizer)
      : optimizer_(optimizer), cover_(DescribeOptimizer(optimizer)) {}
  // The state is that of these shards of this rank, as far as they are defined.
  ShardsOfAllRanks(torch::optim::Optimizer& optimizer, const std::vector<ShardOfParameter>& mine);

  // Takes what SaveShards has written on one rank. False, and nothing was taken, if only the archive
  // with all elements will do: where `read` is given, and the state of a class that is not LibTorch's
  // or on its way to a GPU.
  bool Add(torch::serialize::InputArchive& archive, const ReadElements& read = nullptr);
  // Gives the optimizer what was added. Throws if something is missing.
  void Finish();

 private:
  struct Whole {
    at::Tensor parameter;
    std::size_t place = 0;
    at::Tensor target;  // what the state is of
    ShardRange wanted;
    std::unique_ptr<torch::optim::OptimizerParamState> state;
    std::int64_t with_state = 0;  // elements
  };
  // Throws if the parameter lies in another order in memory than when its shards were saved.
  void CheckOrder(const Whole& whole, const std::vector<std::vector<std::int64_t>>& strides) const;
  void Merge(Whole& whole, const ShardRange& range,
             std::unique_ptr<torch::optim::OptimizerParamState> state, const ReadElements& read);

  torch::optim::Optimizer& optimizer_;
  ShardCover cover_;
  // By parameter: the shards that are wanted, in place of whole parameters.
  std::optional<std::unordered_map<const void*, ShardOfParameter>> mine_;
  std::unordered_map<const void*, Whole> wholes_;  // by parameter
};

}  // namespace sirtaki::detail
