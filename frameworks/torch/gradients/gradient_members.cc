#include "frameworks/torch/gradients/gradient_members.h"

#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "core/base/text.h"
#include "core/protocol/wire.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/gradients/optimizer_shards.h"
#include "frameworks/torch/state/fused_step.h"
#include "frameworks/torch/state/tensor_split.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

// A key is the prefix and the name.
std::string WhyTooLong(const std::vector<std::string>& names, const std::string& prefix) {
  const std::size_t most = core::kMaxNameBytes - std::min(prefix.size(), core::kMaxNameBytes);
  for (const std::string& name : names) {
    if (name.size() <= most) continue;
    return "a parameter's name is too long: " + core::Quoted(name) + "; at most " +
           std::to_string(most) + " bytes are allowed";
  }
  return {};
}

// Tells of parameters that are two tensors in the same memory, where what one of them gets back would
// overwrite the other's. Shards may be of one memory, which is cut once; then the ranks compare it.
std::string DescribeSharing(const NamedParameters& named, bool may_be_the_same,
                            std::vector<std::string>* lines) {
  struct Range {
    std::uintptr_t from;
    std::uintptr_t to;
    std::size_t parameter;
  };
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < named.parameters.size(); ++i) {
    const at::Tensor& parameter = named.parameters[i];
    if (parameter.numel() == 0 || !parameter.is_non_overlapping_and_dense()) continue;
    const auto from = reinterpret_cast<std::uintptr_t>(parameter.const_data_ptr());
    ranges.push_back({from, from + parameter.nbytes(), i});
  }
  std::stable_sort(ranges.begin(), ranges.end(),
                   [](const Range& a, const Range& b) { return a.from < b.from; });
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    const Range& before = ranges[i - 1];
    if (ranges[i].from >= before.to) continue;
    const auto [first, second] = std::minmax(before.parameter, ranges[i].parameter);
    const std::string name = core::Quoted(named.names[first]);
    const bool same = HaveSameElements(named.parameters[first], named.parameters[second]);
    if (!same || !may_be_the_same) {
      return "the parameters " + name + " and " + core::Quoted(named.names[second]) +
             " are two tensors in the same memory" + (same ? "" : ", not of the same elements") +
             ": give the optimizer one tensor for both, or leave out op Adasum and the option "
             "shard";
    }
    (*lines)[second] += ", in the memory of " + name;
  }
  return {};
}

}  // namespace

GradientMembers::Description GradientMembers::Describe(NamedTensors names,
                                                       const DistributedOptimizerOptions& options,
                                                       const torch::optim::Optimizer* optimizer,
                                                       const std::type_info* type, int number) {
  const bool of_module = optimizer == nullptr;
  const std::string suffix = number == 1 ? "" : "#" + std::to_string(number);
  Description of;
  of.number = number;
  of.names = std::move(names);
  // The suffix is the number, which all ranks have alike: names may differ by mistake.
  of.what = (of_module ? "parameters of the module" : "parameters of the optimizer") + suffix;
  of.prefix = options.op() == ReduceOp::Adasum ? "delta" : "gradient";
  of.prefix += (options.name().empty() ? suffix : ":" + options.name()) + "/";
  of.invalid = WhyInvalid(options, of_module);
  if (options.check_parameters_every() > 0) {
    of.habits = ", checked every " + std::to_string(options.check_parameters_every()) + " steps";
  }
  of.sharded = options.shard() != Shard::None;
  if (optimizer == nullptr || !of.invalid.empty()) return of;
  if (dynamic_cast<const torch::optim::LBFGS*>(optimizer) != nullptr && IsOfAStage(*optimizer)) {
    of.invalid =
        "LBFGS cannot train a pipeline: its step looks at all parameters at once, which no rank "
        "has; use an optimizer that works element by element";
    return of;
  }
  if (options.fused()) {
    of.habits += ", by fused steps";
    of.invalid = WhyNotFused(*type);
  }
  if (!of.sharded || !of.invalid.empty()) return of;
  of.invalid = WhyNotSharded(*optimizer);
  ShardBy by = options.shard_by();
  if (by == ShardBy::Auto) by = ChooseShardBy(*type);
  of.habits += by == ShardBy::Element ? ", sharded by element" : ", sharded by parameter";
  if (options.shard_over() == ShardOver::Host) of.habits += ", within each host";
  if (!options.share_parameters()) of.habits += ", each rank with its own parameters";
  return of;
}

GradientMembers::GradientMembers(Description description, SessionSet set,
                                 std::shared_ptr<const GradientRule> rule)
    : of_(std::move(description)), set_(std::move(set)), rule_(std::move(rule)) {}

const ParameterGradient* GradientMembers::FirstReported() const {
  const auto is_reported = [](const GradientPtr& member) { return member->gate().reported(); };
  if (counts_->gates.reported == 0 && std::none_of(others_.begin(), others_.end(), is_reported)) {
    return nullptr;
  }
  const auto found = std::find_if(all_.begin(), all_.end(), is_reported);
  return found == all_.end() ? nullptr : found->get();
}

bool GradientMembers::AnyTouched(const std::vector<GradientPtr>& except) const {
  const auto is_touched = [&except](const GradientPtr& member) {
    return member->gate().touched() &&
           std::find(except.begin(), except.end(), member) == except.end();
  };
  // A gradient that is counted may be one that the optimizer no longer has.
  return std::any_of(others_.begin(), others_.end(), is_touched) ||
         (counts_->gates.touched > 0 && std::any_of(all_.begin(), all_.end(), is_touched));
}

// Those that are new are not registered yet.
std::vector<GradientPtr> GradientMembers::GradientsOf(const NamedParameters& named,
                                                      std::string* error) {
  std::vector<GradientPtr> gradients;
  for (std::size_t i = 0; i < named.names.size(); ++i) {
    const std::string& name = named.names[i];
    GradientPtr gradient =
        set_.session->gradients().OfParameter(named.parameters[i].unsafeGetTensorImpl());
    if (gradient) {
      if (&gradient->rule() != rule_.get() && !CanShare(gradient->rule(), *rule_)) {
        *error =
            "the gradient of " + core::Quoted(name) +
            " is reduced for another optimizer or module already (" + ToText(gradient->rule()) +
            "; here " + ToText(*rule_) +
            "): optimizers of the same parameter need the same options, op Average and no hook; a "
            "module that averages gradients needs an optimizer that does not";
        return gradients;
      }
    } else {
      const std::string key = of_.prefix + name;
      if (set_.session->gradients().OfKey(core::Key::Named(set_.members.set, key))) {
        *error = "the name " + core::Quoted(name) + " is in use by another optimizer (" +
                 core::Quoted(key) + "): give optimizers different names";
        return gradients;
      }
      gradient = std::make_shared<ParameterGradient>(
          ParameterGradient::Description{name, key, static_cast<std::int64_t>(i),
                                         named.parameters[i], rule_, counts_},
          set_);
    }
    gradients.push_back(std::move(gradient));
  }
  return gradients;
}

// Where those are that are on GPUs. These get their slots here, in the order of the parameters,
// which all ranks have: a backward over several GPUs would use them first in any order.
std::string GradientMembers::DescribePlaces(const NamedParameters& named,
                                            std::vector<std::string>* lines) const {
  for (std::size_t i = 0; i < named.parameters.size(); ++i) {
    if (!IsOnGpu(named.parameters[i])) continue;
    std::shared_ptr<session::Gpu> gpu;
    const std::string why = FindGpuOf(named.parameters[i], *set_.session, &gpu);
    if (!why.empty()) return "the parameter " + core::Quoted(named.names[i]) + ": " + why;
    (*lines)[i] += ", on a GPU";
    if (gpu->slot() > 0) (*lines)[i] += ", slot " + std::to_string(gpu->slot());
  }
  return {};
}

void GradientMembers::Take(const NamedParameters& named) {
  std::string error = !of_.invalid.empty() ? of_.invalid : named.error;
  if (error.empty()) error = WhyTooLong(named.names, of_.prefix);
  std::vector<GradientPtr> gradients;
  if (error.empty() && active()) gradients = GradientsOf(named, &error);

  std::vector<std::string> lines = DescribeAll(named);
  if (error.empty() && active() && !rule_->alone) error = DescribePlaces(named, &lines);
  if (error.empty() && (of_.sharded || rule_->of_steps())) {
    error = DescribeSharing(named, /*may_be_the_same=*/of_.sharded, &lines);
  }
  // Optimizers that share a parameter here have to share it everywhere.
  for (std::size_t i = 0; i < gradients.size() && error.empty(); ++i) {
    if (gradients[i]->key() != of_.prefix + named.names[i])
      lines[i] += ", as " + gradients[i]->key();
  }
  std::string options = "gradients by " + ToText(*rule_) + ", called " + core::Quoted(of_.prefix);
  options += of_.habits;
  // A parameter that lies in another order has other elements in its shards.
  for (std::size_t i = 0; of_.sharded && i < named.parameters.size(); ++i) {
    const at::Tensor& parameter = named.parameters[i];
    lines[i] += ", strides";
    for (std::int64_t d = 0; d < parameter.dim(); ++d) {
      if (parameter.size(d) != 1) lines[i] += " " + std::to_string(parameter.stride(d));
    }
  }
  lines.insert(lines.begin(), std::move(options));
  AgreeOnList(of_.what, lines, error, set_);

  others_.clear();
  for (const GradientPtr& gradient : gradients) {
    if (&gradient->rule() != rule_.get()) {
      others_.push_back(gradient);
      gradient->Share();
      // The gradient joins at once where nothing is under way between two calls: which of its
      // optimizers would come to its bucket first may differ between ranks.
      if (rule_->at_backward) {
        for (const GradientPtr& mate : gradient->BucketMates()) mate->TakeOut();
      }
    }
    set_.session->gradients().Add(gradient->parameter().unsafeGetTensorImpl(),
                                  core::Key::Named(set_.members.set, gradient->key()), gradient);
    gradient->Attach();
  }
  newest_.clear();
  const std::unordered_set<GradientPtr> known(all_.begin(), all_.end());
  std::copy_if(gradients.begin(), gradients.end(), std::back_inserter(newest_),
               [&known](const GradientPtr& gradient) { return known.count(gradient) == 0; });
  all_ = std::move(gradients);
  if (!scanned_) return;
  for (const GradientPtr& gradient : newest_) gradient->NoteHooksLate();
}

void GradientMembers::TakeAll() {
  NamedParameters named;
  std::unordered_set<const void*> seen;
  for (const auto& [name, tensor] : of_.names) {
    // The first counts of several names of one tensor (tied weights).
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    named.names.push_back(name);
    named.parameters.push_back(tensor);
  }
  Take(named);
}

bool GradientMembers::Scan(const torch::optim::Optimizer& optimizer) {
  // Looks at every parameter in every step: hardly more than a comparison each.
  std::size_t at = 0;
  bool same = scanned_.has_value();
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      same = same && at < scanned_->size() && (*scanned_)[at] == parameter.unsafeGetTensorImpl();
      ++at;
    }
  }
  if (same && at == scanned_->size()) return false;
  if (scanned_) NameAdded(optimizer, &of_.names);
  Take(MatchNames(optimizer, of_.names));
  scanned_.emplace();
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      scanned_->push_back(parameter.unsafeGetTensorImpl());
    }
  }
  return true;
}

void GradientMembers::CheckStreams() const {
  CallGpus gpus;
  for (const GradientPtr& member : all_) {
    if (member->captured()) return;
    if (std::find(gpus.begin(), gpus.end(), member->gpu()) == gpus.end()) {
      gpus.push_back(member->gpu());
    }
  }
  ThrowIfError(detail::CheckStreams(gpus));
}

void GradientMembers::CheckResults() const {
  if (std::any_of(all_.begin(), all_.end(),
                  [](const GradientPtr& member) { return IsOnGpu(member->parameter()); })) {
    ThrowIfError(set_.session->Check());
  }
}

}  // namespace sirtaki::detail
