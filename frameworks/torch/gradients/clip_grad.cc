#include "frameworks/torch/gradients/clip_grad.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/session/session_state.h"
#include "frameworks/torch/state/optimizer_archive.h"
#include "frameworks/torch/state/tensor_split.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/collectives.h"
#include "sirtaki/optimizer.h"

namespace sirtaki {
namespace {

[[noreturn]] void RefuseClip(const std::string& text) {
  detail::ThrowInvalid("clip_grad_norm_: " + text);
}

// Whether the parameter is split over this set (null: is whole).
bool IsOf(const at::Tensor& parameter, const detail::TensorSplit* split) {
  const detail::TensorSplitPtr own = detail::SplitOverRanks(parameter);
  if (own == nullptr || split == nullptr) return own.get() == split;
  return own->set.members.set == split->set.members.set;
}

std::vector<at::Tensor> GradientsOf(const torch::optim::Optimizer& optimizer,
                                    const detail::CountsGradient& counts = nullptr) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : detail::DistinctParametersOf(optimizer)) {
    if (counts && !counts(parameter)) continue;
    if (parameter.grad().defined()) gradients.push_back(parameter.grad().detach());
  }
  return gradients;
}

// ShardsOf gives the gradients that the optimizer keeps in place of its parameters'; none: it keeps no
// shards.
std::optional<std::vector<at::Tensor>> ShardsOf(torch::optim::Optimizer& optimizer) {
  const detail::GradientReducer* const reducer = detail::ReducerOf(optimizer);
  return reducer == nullptr ? std::nullopt : reducer->gradient_shards();
}

// Those that are not zero for certain, once each.
at::Tensor ValuesOf(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient.coalesce().values() : gradient;
}

// Returns the norm of all gradients together, where the first is. One number comes from every other
// device, and a GPU computes the norms of many gradients at a time. A gradient without elements has no
// largest one.
at::Tensor NormOf(const std::vector<at::Tensor>& gradients, double norm_type) {
  std::vector<std::pair<at::Device, std::vector<at::Tensor>>> lists;
  for (const at::Tensor& gradient : gradients) {
    at::Tensor values = ValuesOf(gradient);
    if (values.numel() == 0) continue;
    const at::Device device = gradient.device();
    auto found = std::find_if(lists.begin(), lists.end(),
                              [device](const auto& list) { return list.first == device; });
    if (found == lists.end()) found = lists.insert(lists.end(), {device, {}});
    found->second.push_back(std::move(values));
  }
  if (lists.empty()) return at::full({}, 0.0, at::kDouble);
  std::vector<at::Tensor> of_devices;
  for (const auto& [device, list] : lists) {
    const at::Tensor norms = at::stack(at::_foreach_norm(list, norm_type)).to(at::kDouble);
    of_devices.push_back(at::linalg_vector_norm(norms, norm_type).to(gradients.front().device()));
  }
  return of_devices.size() == 1 ? of_devices.front()
                                : at::linalg_vector_norm(at::stack(of_devices), norm_type);
}

// Adds the norm of the split parameters' parts on all ranks of the set to that of whole parameters. The
// latter is that of the set's first rank, whose last bits the others need as well.
double JoinParts(double whole, double part, double norm_type, const detail::SessionSet& set) {
  const at::Tensor own = at::tensor({whole, part}, at::kDouble).unsqueeze(0);
  const at::Tensor all = detail::AllGatherBlocking(own, "sirtaki/clip_grad_norm_ of parts", set);
  const at::Tensor norms = at::cat({all.select(0, 0).narrow(0, 0, 1), all.select(1, 1)});
  return at::linalg_vector_norm(norms, norm_type).item<double>();
}

}  // namespace

void detail::CheckMaxNorm(double max_norm) {
  if (max_norm >= 0) return;
  RefuseClip("max_norm is " + std::to_string(max_norm) + "; it has to be at least 0");
}

double detail::NormOfGradients(torch::optim::Optimizer& optimizer, double norm_type,
                               const CountsGradient& counts) {
  detail::GradientReducer* const reducer = detail::ReducerOf(optimizer);
  if (reducer != nullptr) reducer->Synchronize(optimizer);

  const at::NoGradGuard no_grad;
  const auto shards = ShardsOf(optimizer);
  const bool of_shards = shards.has_value();
  if (of_shards && !(norm_type > 0)) {
    RefuseClip("norm_type is " + std::to_string(norm_type) +
               "; with Shard::Gradients it has to be above 0");
  }
  const std::vector<detail::TensorSplitPtr> split_sets = detail::SplitSetsOf(optimizer);
  if (!split_sets.empty() && (of_shards || !(norm_type > 0))) {
    RefuseClip(of_shards ? "parameters that are split over ranks need Shard::OptimizerState in "
                           "place of Shard::Gradients: the norm of shards cannot be told apart"
                         : "norm_type is " + std::to_string(norm_type) +
                               "; with parameters that are split over ranks it has to be above 0");
  }
  const bool has_none = !of_shards && split_sets.empty() && GradientsOf(optimizer).empty();
  if (has_none && !IsOfAStage(optimizer))
    return 0;  // the copies of a stage ask each other all the same
  const auto counted = [&](const detail::TensorSplit* split) {
    return GradientsOf(optimizer, [&](const at::Tensor& parameter) {
      return IsOf(parameter, split) && (!counts || counts(parameter));
    });
  };
  const at::Tensor total = NormOf(of_shards ? *shards : counted(nullptr), norm_type);
  double norm = total.item<double>();
  for (const detail::TensorSplitPtr& split : split_sets) {
    const double part = NormOf(counted(split.get()), norm_type).item<double>();
    norm = JoinParts(norm, part, norm_type, split->set);
  }
  if (reducer != nullptr && !reducer->has_local_gradients()) {
    // A sum's last bits depend on the number of threads, which hosts may differ in. Those that have
    // joined give no row.
    const detail::SessionScope scope(reducer->session());
    // The other hosts have the same shards with ShardOver::Host.
    if (of_shards &&
        reducer->shard_set().ranks().front() != reducer->process_set().ranks().front()) {
      norm = 0;
    }
    const at::Tensor norms = allgather(
        at::full({1}, norm, at::kDouble),
        AllgatherOptions().name("sirtaki/clip_grad_norm_").process_set(reducer->process_set()));
    norm = of_shards ? at::linalg_vector_norm(norms, norm_type).item<double>()
                     : norms.const_data_ptr<double>()[0];
  }
  // It has waited for a GPU, where what was averaged may have failed since.
  if (reducer != nullptr && total.is_cuda()) {
    detail::ThrowIfError(reducer->session()->Check());
  }
  return norm;
}

void detail::ScaleGradients(torch::optim::Optimizer& optimizer, double max_norm, double norm,
                            bool error_if_nonfinite) {
  if (error_if_nonfinite && !std::isfinite(norm)) {
    RefuseClip("the norm of the gradients is not finite");
  }
  const double factor = max_norm / (norm + 1e-6);
  if (!std::isfinite(max_norm) || factor >= 1) return;
  const at::NoGradGuard no_grad;
  const auto shards = ShardsOf(optimizer);
  for (const at::Tensor& gradient : shards ? *shards : GradientsOf(optimizer)) {
    // The gradient keeps its memory: a sparse tensor's own mul_ takes new memory.
    (gradient.is_sparse() ? gradient._values() : gradient).mul_(factor);
  }
}

double clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  if (detail::IsOfAStage(optimizer)) {
    RefuseClip(
        "the optimizer has the parameters of this rank's stages of a pipeline, and the norm is "
        "that of all stages; call clip_grad_norm_ of the pipeline, with the optimizer");
  }
  detail::CheckMaxNorm(max_norm);
  if (std::isnan(norm_type)) RefuseClip("norm_type is not a number");
  const double norm = detail::NormOfGradients(optimizer, norm_type);
  detail::ScaleGradients(optimizer, max_norm, norm, error_if_nonfinite);
  return norm;
}

}  // namespace sirtaki
