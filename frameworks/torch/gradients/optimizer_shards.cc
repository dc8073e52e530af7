#include "frameworks/torch/gradients/optimizer_shards.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <typeinfo>
#include <unordered_set>
#include <utility>

#include "frameworks/torch/state/named_parameters.h"
#include "frameworks/torch/state/optimizer_device.h"
#include "frameworks/torch/state/sharded_state.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

using torch::optim::Optimizer;

// Throws where the parameter cannot be cut, or was cut otherwise. `cuts` and `strides`: how; without
// any it was not.
void CheckParameter(const at::Tensor& parameter, at::IntArrayRef cuts, at::IntArrayRef strides) {
  std::string why;
  if (!parameter.is_non_overlapping_and_dense() || parameter.is_conj() || parameter.is_neg()) {
    why = "does not lie dense in memory: make it contiguous before the optimizer is made";
  } else if (!cuts.empty() && (parameter.numel() != cuts.back() ||
                               parameter.dim() != static_cast<std::int64_t>(strides.size()) ||
                               !LiesWith(parameter, strides))) {
    why =
        "has another shape or lies in memory in another order than at its first step: choose the "
        "memory format before the optimizer is made";
  } else if (parameter.grad().defined() && parameter.grad().layout() != at::kStrided) {
    why =
        "has a sparse gradient, which has no shards: leave out the option shard, or make it dense "
        "by sparse_as_dense";
  }
  if (why.empty()) return;
  throw std::invalid_argument("a parameter of " + TypeAndShape(parameter) + " " + why);
}

}  // namespace

ShardBy ChooseShardBy(const std::type_info& type) {
  using namespace torch::optim;
  const bool by_element = type == typeid(Adagrad) || type == typeid(Adam) ||
                          type == typeid(AdamW) || type == typeid(RMSprop) || type == typeid(SGD);
  return by_element ? ShardBy::Element : ShardBy::Parameter;
}

void ThrowJoined(int rank) {
  ThrowInvalid("step() of a sharded optimizer: rank " + std::to_string(rank) +
                   " has joined, and nobody makes the step of its shard. Ranks make "
                   "equally many steps: give each as many batches, as "
                   "DistributedSampler does, which pads or drops samples",
               core::Origin{rank, "", ""});
}

std::string WhyNotSharded(const Optimizer& optimizer) {
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr) return {};
  return "LBFGS looks at all parameters at once, so its state cannot be sharded: leave out the "
         "option shard";
}

std::vector<std::int64_t> CutShards(std::int64_t elements, std::int64_t element_bytes, int ranks,
                                    int least, ShardBy by) {
  const std::int64_t unit = std::max<std::int64_t>(1, 128 / element_bytes);
  const bool whole = by == ShardBy::Parameter || elements < unit * ranks;
  std::vector<std::int64_t> cuts;
  for (int rank = 0; rank < ranks; ++rank) {
    cuts.push_back(whole ? (rank > least ? elements : 0) : elements / ranks * rank / unit * unit);
  }
  cuts.push_back(elements);
  return cuts;
}

OptimizerShards::OptimizerShards(SessionSet set, std::string what, ShardBy by, bool of_gradients,
                                 bool common)
    : set_(std::move(set)),
      what_(std::move(what)),
      by_(by),
      of_gradients_(of_gradients),
      elements_(static_cast<std::size_t>(set_.size())),
      common_(set_, what_, common) {}

const OptimizerShards::Shards* OptimizerShards::FindCut(const at::Tensor& parameter) const {
  const auto found = shards_.find(parameter.unsafeGetTensorImpl());
  return found == shards_.end() || found->second.cuts.empty() ? nullptr : &found->second;
}

OptimizerShards::Shards& OptimizerShards::ShardsOf(const at::Tensor& parameter) {
  Shards& shards = shards_[parameter.unsafeGetTensorImpl()];
  CheckParameter(parameter, shards.cuts, shards.strides);
  if (shards.cuts.empty()) {
    const auto least = std::min_element(elements_.begin(), elements_.end());
    const auto same = std::find_if(shards_.begin(), shards_.end(), [&](const auto& other) {
      return !other.second.cuts.empty() && HaveSameElements(other.second.parameter, parameter);
    });
    shards.number = ++cut_;
    shards.parameter = parameter;
    shards.strides = parameter.strides().vec();
    // One rank steps what several parameters have in the same memory.
    shards.cuts = same != shards_.end()
                      ? same->second.cuts
                      : CutShards(parameter.numel(), parameter.element_size(), set_.size(),
                                  static_cast<int>(least - elements_.begin()), by_);
    for (std::size_t i = 0; i < elements_.size(); ++i) {
      elements_[i] += shards.cuts[i + 1] - shards.cuts[i];
    }
  }
  return shards;
}

void OptimizerShards::Place(Shards& shards) const {
  const std::int64_t count = shards.cuts[self() + 1] - shards.cuts[self()];
  if (count == 0) return;
  if (count == shards.parameter.numel()) {
    shards.mine = shards.parameter;
    return;
  }
  const at::Tensor& whole = shards.place.memory ? shards.place.common : shards.parameter;
  // A view would keep the memory that it was made of.
  at::Tensor mine = FlatLike(whole, whole).narrow(0, shards.cuts[self()], count).variable_data();
  if (!shards.mine.defined()) {
    shards.mine = std::move(mine);
  } else if (shards.mine.data_ptr() != mine.data_ptr()) {
    shards.mine.set_data(mine);  // the parameter has got other memory; state belongs to the tensor
  }
}

// The state of the whole parameter is cut, and what belongs to others is let go.
void OptimizerShards::TakeState(Optimizer& optimizer, const Shards& shards) const {
  const auto found = optimizer.state().find(shards.parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end() || shards.mine.is_same(shards.parameter)) return;
  if (shards.mine.defined() && found->second) {
    const auto tensors = TensorsOfState(*found->second);
    if (!tensors) {
      throw std::runtime_error(
          "the optimizer has state of a class that is not LibTorch's, which nobody can cut: shard "
          "by ShardBy::Parameter");
    }
    for (at::Tensor* const tensor : *tensors) {
      if (!tensor->defined() || tensor->sizes() != shards.parameter.sizes()) continue;
      *tensor = FlatLike(shards.parameter, *tensor)
                    .narrow(0, shards.cuts[self()], shards.mine.numel())
                    .clone();
    }
  }
  std::unique_ptr<torch::optim::OptimizerParamState> state = std::move(found->second);
  optimizer.state().erase(found);
  if (shards.mine.defined() && state) {
    optimizer.state()[shards.mine.unsafeGetTensorImpl()] = std::move(state);
  }
}

void OptimizerShards::Find(const Optimizer& optimizer, std::vector<Shards*>* all,
                           std::vector<Shards*>* stepped) {
  std::unordered_set<const void*> seen;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      Shards& shards = ShardsOf(parameter);
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      all->push_back(&shards);
      if (shards.has_gradient && parameter.grad().defined()) {
        throw std::invalid_argument("a parameter of " + TypeAndShape(parameter) +
                                    " has got a .grad since its gradient was averaged, and its "
                                    "shard is kept elsewhere with Shard::Gradients");
      }
      if (shards.is_stepped()) stepped->push_back(&shards);
    }
  }
}

// Cuts the parameters, their gradients and their state. Returns what is to be in the place of each
// group's parameters.
OptimizerShards::Groups OptimizerShards::Cut(Optimizer& optimizer, const std::vector<Shards*>& all,
                                             const std::vector<Shards*>& stepped) {
  for (Shards* const shards : all) Place(*shards);
  Groups groups;
  for (const auto& group : optimizer.param_groups()) {
    std::vector<at::Tensor>& of_group = groups.emplace_back();
    for (const at::Tensor& parameter : group.params()) {
      const at::Tensor& mine = shards_.at(parameter.unsafeGetTensorImpl()).mine;
      if (mine.defined()) of_group.push_back(mine);
    }
  }
  is_cut_ = true;  // from here on, whatever is cut when something throws
  for (const Shards* const shards : all) {
    TakeState(optimizer, *shards);
    const bool is_whole = shards->mine.is_same(shards->parameter);
    if (is_whole && shards->place.memory) shards->parameter.set_data(shards->place.common);
  }
  for (Shards* const shards : stepped) {
    if (!shards->mine.defined()) continue;
    if (shards->has_gradient) {
      shards->mine.mutable_grad() = shards->gradient;
    } else if (!shards->mine.is_same(shards->parameter)) {
      shards->mine.mutable_grad() = FlatLike(shards->parameter, shards->parameter.grad())
                                        .narrow(0, shards->cuts[self()], shards->mine.numel());
    }
  }
  return groups;
}

void OptimizerShards::Uncut(const std::vector<Shards*>& all,
                            const std::vector<Shards*>& stepped) const {
  for (Shards* const shards : all) {
    const at::Tensor& mine = shards->mine;
    const CommonPlace& place = shards->place;
    if (!mine.defined() || (mine.is_same(shards->parameter) && !place.memory)) continue;
    // The optimizer may have given the shard other memory (`p.data = …` in Python).
    const at::Tensor& whole = place.memory ? place.common : shards->parameter;
    const auto* const begin =
        static_cast<const std::byte*>(whole.const_data_ptr()) +
        shards->cuts[self()] * static_cast<std::int64_t>(whole.element_size());
    const bool is_whole = mine.is_same(shards->parameter);
    if (mine.const_data_ptr() != begin) {
      FlatLike(whole, whole)
          .narrow(0, shards->cuts[self()], mine.numel())
          .copy_(is_whole ? FlatLike(whole, mine) : mine.detach());
    }
    if (is_whole) shards->parameter.set_data(place.own);
  }
  for (Shards* const shards : stepped) {
    if (!shards->mine.defined()) continue;
    if (shards->has_gradient || !shards->mine.is_same(shards->parameter)) {
      shards->mine.mutable_grad().reset();
    }
  }
}

std::vector<CommonCandidate> OptimizerShards::CandidatesOf(const std::vector<Shards*>& all) const {
  std::vector<CommonCandidate> candidates;
  for (Shards* const shards : all) {
    // A parameter moves only where nothing else has its memory.
    if (common_.WouldMove(shards->parameter, shards->place) && shards->mine.defined() &&
        !shards->mine.is_same(shards->parameter)) {
      shards->mine.set_data(at::empty({0}, shards->mine.options()));
    }
    const bool is_cut = !shards->cuts.empty();
    const std::int64_t begin = is_cut ? shards->cuts[self()] : 0;
    const std::int64_t end = is_cut ? shards->cuts[self() + 1] : 0;
    candidates.push_back(
        {shards->parameter, &shards->place, begin, end - begin, shards->is_stepped()});
  }
  return candidates;
}

void OptimizerShards::Step(Optimizer& optimizer, const std::function<void()>& base_step) {
  const at::NoGradGuard no_grad;
  std::vector<Shards*> all;
  std::vector<Shards*> stepped;
  std::exception_ptr first_error;
  std::string error;
  // Every rank comes to each of the calls in which it meets the others, with its error if it has one.
  const auto attempt = [&](const auto& part) {
    try {
      part();
    } catch (...) {
      if (first_error) return;
      first_error = std::current_exception();
      error = TextOfCurrent();
    }
  };
  const auto meet = [&](const auto& call) {
    try {
      call();
    } catch (...) {
      if (!first_error) throw;
      std::rethrow_exception(first_error);
    }
  };
  attempt([&] { Find(optimizer, &all, &stepped); });
  const std::vector<CommonCandidate> candidates = CandidatesOf(all);
  meet([&] { common_.Meet(candidates, error, /*in_step=*/true); });
  if (!first_error) {
    attempt([&] {
      CommonParameters::TakeWritten(candidates);
      const InPlaceOfParameters in_place(optimizer, Cut(optimizer, all, stepped));
      base_step();
    });
    attempt([&] { Uncut(all, stepped); });
    attempt([&] { CommonParameters::TakeWritten(candidates); });
  }
  meet([&] { Gather(std::move(stepped), error); });
  if (first_error) std::rethrow_exception(first_error);
}

void OptimizerShards::Share(const Optimizer& optimizer) {
  if (!common_.on()) return;
  const at::NoGradGuard no_grad;
  std::vector<Shards*> all;
  for (const auto& [name, parameter] : NamesByPosition(optimizer)) {
    all.push_back(&shards_[parameter.unsafeGetTensorImpl()]);
    all.back()->parameter = parameter;
  }
  common_.Meet(CandidatesOf(all), /*error=*/{}, /*in_step=*/false);
  for (Shards* const shards : all) {
    if (!shards->cuts.empty()) Place(*shards);
  }
}

void OptimizerShards::LetGoOfCopies() {
  if (is_cut_ || !common_.on()) return;
  std::vector<CommonCandidate> candidates;
  for (auto& [key, shards] : shards_) candidates.push_back({shards.parameter, &shards.place});
  CommonParameters::LetGoOfEqual(candidates);
}

void OptimizerShards::Save(Optimizer& optimizer, torch::serialize::OutputArchive& archive) {
  Groups groups;
  std::vector<ShardRange> ranges;
  for (const auto& group : optimizer.param_groups()) {
    std::vector<at::Tensor>& of_group = groups.emplace_back();
    for (const at::Tensor& parameter : group.params()) {
      const Shards* const cut = FindCut(parameter);
      if (cut == nullptr) {  // no step has seen it: there is no state to be lost
        ranges.push_back({0, self() == 0 ? parameter.numel() : 0});
        if (self() == 0) of_group.push_back(parameter);
        continue;
      }
      ranges.push_back({cut->cuts[self()], cut->cuts[self() + 1] - cut->cuts[self()]});
      if (ranges.back().count > 0) of_group.push_back(cut->mine);
    }
  }
  // The optimizer's save() takes what it has for whole.
  const Scope cut_again([this] { is_cut_ = true; });
  is_cut_ = false;
  SaveShards(optimizer, std::move(groups), ranges, archive);
}

void OptimizerShards::CutParameters(const Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) Place(ShardsOf(parameter));
  }
}

std::vector<ShardOfParameter> OptimizerShards::Mine() const {
  std::vector<ShardOfParameter> mine;
  for (const auto& [key, shards] : shards_) {
    // A parameter without elements is whole on every rank, so that it has state as without shards.
    const bool is_empty = !shards.cuts.empty() && shards.cuts.back() == 0;
    if (!shards.mine.defined() && !is_empty && !shards.has_gradient) continue;
    mine.push_back({shards.parameter, is_empty ? shards.parameter : shards.mine,
                    shards.cuts[self()], shards.has_gradient});
  }
  return mine;
}

std::optional<core::KeptPart> OptimizerShards::PartToKeep(const at::Tensor& parameter,
                                                          const at::Tensor& result,
                                                          at::Tensor* shard) const {
  const Shards* const cut = FindCut(parameter);
  // What is wrong with the parameter, if something is, TakeGradient says.
  if (cut == nullptr) return std::nullopt;
  const std::vector<std::int64_t>& cuts = cut->cuts;
  if (parameter.numel() != cuts.back() || result.sizes() != parameter.sizes() ||
      !LiesWith(result, parameter.strides())) {
    return std::nullopt;
  }
  const std::int64_t count = cuts[self() + 1] - cuts[self()];
  // A gradient may have another type than its parameter.
  const auto size = static_cast<std::int64_t>(result.element_size());
  core::KeptPart kept{cuts[self()] * size, count * size, result.mutable_data_ptr()};
  if (shard == nullptr) {
    kept.memory = static_cast<std::byte*>(kept.memory) + kept.begin;
  } else if (count > 0 && count < parameter.numel()) {
    *shard = at::empty({count}, result.options().requires_grad(false));
    kept.memory = shard->mutable_data_ptr();
  }
  return kept;
}

core::PartCuts OptimizerShards::CutsOf(const at::Tensor& parameter) const {
  const Shards* const cut = FindCut(parameter);
  if (cut == nullptr) return nullptr;
  return std::make_shared<const std::vector<std::int64_t>>(cut->cuts);
}

bool OptimizerShards::MayTake(const at::Tensor& parameter) const {
  const Shards* const cut = FindCut(parameter);
  return cut != nullptr && !cut->has_gradient;
}

void OptimizerShards::TakeGradient(const at::Tensor& parameter, const at::Tensor& average,
                                   const at::Tensor& shard) {
  if (FindCut(parameter) == nullptr) {
    ThrowInvalid("the gradient of a parameter of " + TypeAndShape(parameter) +
                 " cannot be kept in shards: zero_grad() of the optimizer cuts the "
                 "parameter, or says why it cannot");
  }
  Shards& shards = shards_.at(parameter.unsafeGetTensorImpl());
  if (shards.has_gradient) {
    ThrowInvalid(
        "the gradient of a parameter of " + TypeAndShape(parameter) +
        " was averaged again before a step has used it, which Shard::Gradients does not allow: "
        "let the passes add up in no_sync() or by backward_passes_per_step, and call "
        "zero_grad() of the optimizer, not of the model, where a step is left out");
  }
  shards.has_gradient = true;
  // It has got another shape since, which the step tells to all ranks.
  if (parameter.numel() != shards.cuts.back()) return;
  const std::int64_t count = shards.cuts[self() + 1] - shards.cuts[self()];
  if (count == parameter.numel()) {
    shards.gradient = average;
  } else if (count > 0) {
    shards.gradient = shard;
    if (shard.defined()) return;
    shards.gradient =
        FlatLike(parameter, average.detach()).narrow(0, shards.cuts[self()], count).clone();
  }
}

void OptimizerShards::DropGradients() {
  for (auto& [key, shards] : shards_) {
    shards.has_gradient = false;
    shards.gradient.reset();
  }
}

std::vector<at::Tensor> OptimizerShards::Gradients() const {
  std::map<std::size_t, at::Tensor> ordered;
  for (const auto& [key, shards] : shards_) {
    if (shards.gradient.defined()) ordered.emplace(shards.number, shards.gradient);
  }
  std::vector<at::Tensor> gradients;
  for (auto& [number, gradient] : ordered) gradients.push_back(std::move(gradient));
  return gradients;
}

}  // namespace sirtaki::detail
