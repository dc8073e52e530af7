#include "frameworks/torch/state/sharded_state.h"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/base/text.h"
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

}  // namespace

std::optional<std::vector<std::int64_t>> SizesInLine(const std::string& line) {
  std::size_t at = line.rfind('[');
  if (line.starts_with("group ") || at == std::string::npos) return std::nullopt;
  std::vector<std::int64_t> sizes;
  for (++at; at + 1 < line.size(); at = std::min(line.find(',', at), line.size() - 1) + 1) {
    sizes.push_back(std::stoll(line.substr(at)));
  }
  return sizes;
}

ShardCover::ShardCover(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) {
    const auto sizes = SizesInLine(line);
    if (!sizes) continue;
    places_.push_back({line, c10::multiply_integers(*sizes), {}});
  }
}

std::vector<ShardRange> ShardCover::RangesOf(torch::serialize::InputArchive& archive) const {
  const std::vector<std::int64_t> begins = ReadList(archive, "begins");
  const std::vector<std::int64_t> counts = ReadList(archive, "counts");
  if (begins.size() != places_.size() || counts.size() != places_.size()) {
    throw std::runtime_error("a shard is of " + std::to_string(begins.size()) +
                             " parameters, and the optimizer has " +
                             std::to_string(places_.size()));
  }
  std::vector<ShardRange> ranges;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const ShardRange& range = ranges.emplace_back(ShardRange{begins[i], counts[i]});
    if (range.begin < 0 || range.count < 0 || range.begin > places_[i].elements - range.count) {
      throw std::runtime_error("a shard does not fit " + places_[i].line);
    }
  }
  return ranges;
}

void ShardCover::Add(const std::vector<ShardRange>& ranges) {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (ranges[i].count == 0) continue;
    places_[i].counts_by_begin.emplace(ranges[i].begin, ranges[i].count);
  }
}

void ShardCover::Finish() const {
  for (const Place& place : places_) {
    std::int64_t end = 0;
    std::string text;
    bool once = true;
    for (const auto& [begin, count] : place.counts_by_begin) {
      once = once && begin == end;
      end = begin + count;
      text +=
          (text.empty() ? " " : ", ") + std::to_string(begin) + " to " + std::to_string(end - 1);
    }
    if (once && end == place.elements) continue;
    throw std::runtime_error(place.line + ": the shards have the elements" +
                             (text.empty() ? " none" : text) + ", instead of each of " +
                             std::to_string(place.elements) +
                             " once: is a file of shards a copy of another one?");
  }
}

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
  for (const at::Tensor& parameter : ParametersOf(optimizer)) {
    strides.push_back(c10::List<std::int64_t>(parameter.strides()));
  }
  archive.write("strides", c10::IValue(strides));
  const InPlaceOfParameters in_place(optimizer, std::move(shards));
  SaveOptimizer(optimizer, archive);
}

ShardsOfAllRanks::ShardsOfAllRanks(Optimizer& optimizer, const std::vector<ShardOfParameter>& mine)
    : ShardsOfAllRanks(optimizer) {
  mine_.emplace();
  for (const ShardOfParameter& one : mine) {
    if (one.shard.defined()) mine_->emplace(one.parameter.unsafeGetTensorImpl(), one);
  }
}

std::vector<std::vector<std::int64_t>> SavedStrides(torch::serialize::InputArchive& archive) {
  c10::IValue saved;
  std::vector<std::vector<std::int64_t>> strides;
  if (!archive.try_read("strides", saved)) return strides;
  for (const c10::IValue& one : saved.toListRef()) strides.push_back(one.toIntVector());
  return strides;
}

void ShardsOfAllRanks::CheckOrder(const Whole& whole,
                                  const std::vector<std::vector<std::int64_t>>& strides) const {
  if (whole.place >= strides.size()) return;
  const std::vector<std::int64_t>& saved = strides[whole.place];
  const at::Tensor& parameter = whole.parameter;
  const bool has_as_many = saved.size() == static_cast<std::size_t>(parameter.dim());
  if (has_as_many && LiesWith(parameter, saved)) return;
  throw std::runtime_error(
      cover_.line(whole.place) + ": its shards are of memory with the strides " +
      core::ShapeText(saved) + ", and this one has " + core::ShapeText(parameter.strides()) +
      ": give the model that memory format before the optimizer is made, and change it when the "
      "state is loaded");
}

bool ShardsOfAllRanks::Add(torch::serialize::InputArchive& archive, const ReadElements& read) {
  const at::NoGradGuard no_grad;
  const std::vector<ShardRange> ranges = cover_.RangesOf(archive);
  const std::vector<std::vector<std::int64_t>> strides = SavedStrides(archive);
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
      const ShardRange& range = ranges[place];
      const void* const key = parameter.unsafeGetTensorImpl();
      Whole& whole = wholes_[key];
      whole.parameter = parameter;
      whole.place = place++;
      whole.target = parameter;
      whole.wanted = {0, parameter.numel()};
      if (mine_) {
        const auto found = mine_->find(key);
        const bool has = found != mine_->end();
        whole.target = has ? found->second.shard : at::Tensor();
        whole.wanted = has ? ShardRange{found->second.begin, whole.target.numel()} : ShardRange();
      }
      if (range.count == 0) continue;
      if (range.count < parameter.numel()) CheckOrder(whole, strides);
      if (read && !parameter.is_cpu()) return false;
      if (parts.count(key) == 0) {
        const at::Tensor shard =
            range.count == parameter.numel()
                ? parameter
                : FlatLike(parameter, parameter).narrow(0, range.begin, range.count);
        parts[key] = {&whole, range, shard};
      }
      of_group.push_back(parts[key].shard);
    }
  }
  {
    const InPlaceOfParameters in_place(optimizer_, std::move(shards));
    LoadOptimizer(optimizer_, archive);
  }
  const auto state_of = [this](const Part& part) -> std::unique_ptr<OptimizerParamState>* {
    const auto found = optimizer_.state().find(part.shard.unsafeGetTensorImpl());
    return found == optimizer_.state().end() || !found->second ? nullptr : &found->second;
  };
  for (const auto& [key, part] : parts) {
    const auto* const state = state_of(part);
    if (read && state != nullptr && !TensorsOfState(**state)) return false;
  }
  cover_.Add(ranges);
  for (auto& [key, part] : parts) {
    auto* const state = state_of(part);
    if (state == nullptr) continue;
    part.whole->with_state += part.range.count;
    Merge(*part.whole, part.range, std::move(*state), read);
  }
  optimizer_.state().clear();
  return true;
}

void ShardsOfAllRanks::Merge(Whole& whole, const ShardRange& range,
                             std::unique_ptr<OptimizerParamState> state, const ReadElements& read) {
  const at::Tensor& parameter = whole.parameter;
  const bool wants_whole = whole.wanted.count == parameter.numel();
  if (!read && wants_whole && range.count == parameter.numel()) {
    whole.state = std::move(state);
    return;
  }
  const std::int64_t begin = std::max(range.begin, whole.wanted.begin);
  const std::int64_t count =
      std::min(range.begin + range.count, whole.wanted.begin + whole.wanted.count) - begin;
  if (count <= 0) return;
  const auto parts = TensorsOfState(*state);
  if (!parts) {
    throw std::runtime_error(
        "the state of a part of a parameter is of a class that is not LibTorch's");
  }
  const bool is_first = whole.state == nullptr;
  if (is_first) whole.state = std::move(state);
  const auto tensors = TensorsOfState(*whole.state).value();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor part = *(*parts)[i];
    if (!part.defined()) continue;
    if (part.numel() != range.count)
      throw std::runtime_error("the state of a shard has another size");
    if (is_first) {
      *tensors[i] = wants_whole
                        ? at::empty_strided(parameter.sizes(), parameter.strides(), part.options())
                        : at::empty({whole.wanted.count}, part.options());
    }
    const at::Tensor to = (wants_whole ? FlatLike(parameter, *tensors[i]) : *tensors[i])
                              .narrow(0, begin - whole.wanted.begin, count);
    const bool is_whole = range.count == parameter.numel();
    bool is_read = read == nullptr;
    if (!is_read && is_whole && !LiesWith(part, parameter.strides())) {
      const at::Tensor elements = at::empty_like(part);  // in the same order, if it lies dense
      read(part.as_strided({part.numel()}, {1}), elements.as_strided({part.numel()}, {1}));
      part = elements;
      is_read = true;
    }
    const at::Tensor from = (is_whole ? FlatLike(parameter, part) : part.view(-1))
                                .narrow(0, begin - range.begin, count);
    is_read ? static_cast<void>(to.copy_(from)) : read(from, to);
  }
}

void ShardsOfAllRanks::Finish() {
  cover_.Finish();
  for (const auto& [key, whole] : wholes_) {
    if (whole.with_state == whole.parameter.numel() || whole.with_state == 0) continue;
    throw std::runtime_error(cover_.line(whole.place) + ": " + std::to_string(whole.with_state) +
                             " elements of " + std::to_string(whole.parameter.numel()) +
                             " have state");
  }
  optimizer_.state().clear();
  for (auto& [key, whole] : wholes_) {
    if (whole.state) {
      optimizer_.state()[whole.target.unsafeGetTensorImpl()] = std::move(whole.state);
    }
  }
}

}  // namespace sirtaki::detail
