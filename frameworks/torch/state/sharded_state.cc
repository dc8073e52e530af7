#include "frameworks/torch/state/sharded_state.h"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "frameworks/torch/state/optimizer_archive.h"
#include "frameworks/torch/state/optimizer_device.h"
#include "frameworks/torch/tensors/tensor_bridge.h"

namespace sirtaki::detail {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;

std::vector<std::int64_t> ReadList(torch::serialize::InputArchive& archive,
                                   const std::string& key) {
  c10::IValue value;
  if (!archive.try_read(key, value)) throw std::runtime_error("a shard has no " + key);
  return value.toIntVector();
}

std::vector<ShardRange> ReadRanges(torch::serialize::InputArchive& archive,
                                   const Optimizer& optimizer) {
  const std::vector<std::int64_t> begins = ReadList(archive, "begins");
  const std::vector<std::int64_t> counts = ReadList(archive, "counts");
  std::vector<ShardRange> ranges;
  std::size_t place = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (place >= begins.size() || place >= counts.size()) break;
      const ShardRange& range = ranges.emplace_back(ShardRange{begins[place], counts[place]});
      ++place;
      if (range.begin < 0 || range.count < 0 || range.begin > parameter.numel() - range.count) {
        throw std::runtime_error("a shard does not fit the parameter of " +
                                 TypeAndShape(parameter));
      }
    }
  }
  std::size_t places = 0;
  for (const auto& group : optimizer.param_groups()) places += group.params().size();
  if (places != begins.size() || places != counts.size()) {
    throw std::runtime_error("a shard is of " + std::to_string(begins.size()) +
                             " parameters, and the optimizer has " + std::to_string(places));
  }
  return ranges;
}

}  // namespace

at::Tensor FlatLike(const at::Tensor& parameter, at::Tensor tensor) {
  tensor = tensor.detach();
  if (!LiesWith(tensor, parameter.strides())) {
    tensor =
        at::empty_strided(parameter.sizes(), parameter.strides(), tensor.options()).copy_(tensor);
  }
  return tensor.as_strided({tensor.numel()}, {1});
}

InPlaceOfParameters::InPlaceOfParameters(Optimizer& optimizer,
                                         std::vector<std::vector<at::Tensor>> others)
    : optimizer_(optimizer), others_(std::move(others)) {
  Swap();
}

InPlaceOfParameters::~InPlaceOfParameters() { Swap(); }

void InPlaceOfParameters::Swap() {
  // A step of the program's own may remove groups.
  const std::size_t groups = std::min(others_.size(), optimizer_.param_groups().size());
  for (std::size_t g = 0; g < groups; ++g) {
    optimizer_.param_groups()[g].params().swap(others_[g]);
  }
}

void SaveShards(Optimizer& optimizer, std::vector<std::vector<at::Tensor>> shards,
                const std::vector<ShardRange>& ranges, torch::serialize::OutputArchive& archive) {
  std::vector<std::int64_t> begins;
  std::vector<std::int64_t> counts;
  for (const ShardRange& range : ranges) {
    begins.push_back(range.begin);
    counts.push_back(range.count);
  }
  archive.write("begins", c10::IValue(begins));
  archive.write("counts", c10::IValue(counts));
  // Shards are of elements as these lie in memory. A reader without the parameters learns it here.
  c10::List<c10::List<std::int64_t>> strides;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      strides.push_back(c10::List<std::int64_t>(parameter.strides()));
    }
  }
  archive.write("strides", c10::IValue(strides));
  const InPlaceOfParameters in_place(optimizer, std::move(shards));
  SaveOptimizer(optimizer, archive);
}

void ShardsOfAllRanks::Add(torch::serialize::InputArchive& archive) {
  const at::NoGradGuard no_grad;
  const std::vector<ShardRange> ranges = ReadRanges(archive, optimizer_);
  struct Part {
    Whole* whole;
    ShardRange range;
    at::Tensor shard;
  };
  std::unordered_map<const void*, Part> parts;  // by parameter, which may stand in two places
  std::vector<std::vector<at::Tensor>> shards;
  std::size_t place = 0;
  for (const auto& group : optimizer_.param_groups()) {
    std::vector<at::Tensor>& of_group = shards.emplace_back();
    for (const at::Tensor& parameter : group.params()) {
      const ShardRange& range = ranges[place++];
      const void* const key = parameter.unsafeGetTensorImpl();
      Whole& whole = wholes_[key];
      whole.parameter = parameter;
      if (range.count == 0) continue;
      if (parts.count(key) == 0) {
        const at::Tensor shard =
            range.count == parameter.numel()
                ? parameter
                : FlatLike(parameter, parameter).narrow(0, range.begin, range.count);
        parts[key] = {&whole, range, shard};
        whole.in_ranges += range.count;
      }
      of_group.push_back(parts[key].shard);
    }
  }
  {
    const InPlaceOfParameters in_place(optimizer_, std::move(shards));
    LoadOptimizer(optimizer_, archive);
  }
  for (auto& [key, part] : parts) {
    const auto found = optimizer_.state().find(part.shard.unsafeGetTensorImpl());
    if (found == optimizer_.state().end() || !found->second) continue;
    part.whole->with_state += part.range.count;
    Merge(*part.whole, part.range, std::move(found->second));
  }
  optimizer_.state().clear();
}

void ShardsOfAllRanks::Merge(Whole& whole, const ShardRange& range,
                             std::unique_ptr<OptimizerParamState> state) {
  const at::Tensor& parameter = whole.parameter;
  if (range.count == parameter.numel()) {
    whole.state = std::move(state);
    return;
  }
  const auto parts = TensorsOfState(*state);
  if (!parts) {
    throw std::runtime_error(
        "the state of a part of a parameter is of a class that is not LibTorch's");
  }
  const bool is_first = whole.state == nullptr;
  if (is_first) whole.state = std::move(state);
  const auto tensors = TensorsOfState(*whole.state).value();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor part = *(*parts)[i];
    if (!part.defined()) continue;
    if (part.numel() != range.count)
      throw std::runtime_error("the state of a shard has another size");
    if (is_first) {
      *tensors[i] = at::empty_strided(parameter.sizes(), parameter.strides(), part.options());
    }
    FlatLike(parameter, *tensors[i]).narrow(0, range.begin, range.count).copy_(part.view(-1));
  }
}

void ShardsOfAllRanks::Finish() {
  for (auto& [key, whole] : wholes_) {
    const std::int64_t elements = whole.parameter.numel();
    const bool has_all = whole.with_state == elements || whole.with_state == 0;
    if (whole.in_ranges != elements || !has_all) {
      throw std::runtime_error("the shards of a parameter of " + TypeAndShape(whole.parameter) +
                               " have " + std::to_string(whole.in_ranges) + " elements together, " +
                               std::to_string(whole.with_state) + " of them with state");
    }
  }
  optimizer_.state().clear();
  for (auto& [key, whole] : wholes_) {
    if (whole.state)
      optimizer_.state()[whole.parameter.unsafeGetTensorImpl()] = std::move(whole.state);
  }
}

}  // namespace sirtaki::detail
