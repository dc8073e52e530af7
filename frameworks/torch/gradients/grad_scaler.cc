#include "sirtaki/grad_scaler.h"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/calls/call_forms.h"
#include "frameworks/torch/gradients/gradient_unscaling.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/state/optimizer_archive.h"
#include "frameworks/torch/state/tensor_split.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/reductions.h"

namespace sirtaki {
namespace {

[[noreturn]] void ThrowInvalidScale(const std::string& text) {
  detail::ThrowInvalid("GradScaler: " + text);
}

bool IsPositive(double value) { return std::isfinite(value) && value > 0; }

// The parameters are checked, which all ranks have alike, not the gradients that this rank has.
void CheckTypes(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.requires_grad() || parameter.scalar_type() != at::kHalf) continue;
      ThrowInvalidScale(
          "a parameter is float16, which cannot hold a gradient divided by the scale: "
          "keep the parameters in float32 and compute in float16 by autocast");
    }
  }
}

std::vector<at::Tensor> ParametersWithGradients(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters = detail::DistinctParametersOf(optimizer);
  std::erase_if(parameters, [](const at::Tensor& one) { return !one.grad().defined(); });
  return parameters;
}

}  // namespace

struct GradScaler::State {
  ProcessSet SetFor(torch::optim::Optimizer& optimizer) const {
    if (options.process_set().membership()) return options.process_set();
    const detail::GradientReducer* const reducer = detail::ReducerOf(optimizer);
    return reducer != nullptr ? reducer->process_set() : ProcessSet();
  }

  // The stages of a pipeline have other gradients, and train one model: they skip a step together.
  std::vector<ProcessSet> RowsFor(const torch::optim::Optimizer& optimizer) const {
    std::vector<const void*> parameters;
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        parameters.push_back(parameter.unsafeGetTensorImpl());
      }
    }
    return detail::StateOf(given)->pipelines().RowsOf(parameters);
  }

  void AgreeOnSettings(torch::optim::Optimizer& optimizer) {
    AgreeOnSettings(SetFor(optimizer));
    for (const ProcessSet& row : RowsFor(optimizer)) AgreeOnSettings(row);
  }

  // Scales that differ would make gradients that differ, without a word.
  void AgreeOnSettings(const ProcessSet& set) {
    const std::shared_ptr<detail::SessionState> session = detail::StateOf(given);
    // Ranks that have come since the job was joined again have agreed on nothing.
    if (agreed_in.lock() != session) {
      agreed.clear();
      met.clear();
      agreed_in = session;
    }
    // Until a join the ranks may have made different numbers of steps.
    const std::uint64_t joins = *session->JoinsOf(set.id());
    if (const auto found = agreed.find(set.id()); found != agreed.end() && found->second == joins) {
      return;
    }
    std::ostringstream settings;
    settings.precision(17);
    settings << "scale " << scale << ", growth by " << options.growth_factor() << " after "
             << options.growth_interval() << " steps, " << good_steps
             << " of them made, backoff by " << options.backoff_factor();
    detail::AgreeOnList("GradScaler", {options.enabled() ? settings.str() : "disabled"}, "",
                        detail::SessionSet(session, set));
    agreed[set.id()] = joins;
  }

  // The weak pointers keep their addresses from being others'.
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Divided {
    WeakTensor gradient;
    std::uint64_t written;
  };
  struct Met {
    std::optional<detail::LateFlag> infinite;
    std::vector<Divided> divided;
    bool stepped = false;
  };

  // Grows when a backward() writes the gradient; without a DistributedOptimizer when anything does.
  std::uint64_t WrittenOf(const at::Tensor& parameter) const {
    const auto gradient =
        detail::StateOf(given)->gradients().OfParameter(parameter.unsafeGetTensorImpl());
    if (gradient) return gradient->writes();
    return static_cast<std::uint64_t>(detail::VersionOf(parameter.grad()));
  }

  // Throws where the optimizer has a gradient that was divided with another optimizer's.
  void CheckDividedOnce(const torch::optim::Optimizer& optimizer) const {
    std::unordered_map<const void*, std::uint64_t> divided;
    for (const auto& [other, of_other] : met) {
      for (const auto& [gradient, written] : of_other.divided) {
        divided[gradient._unsafe_get_target()] = written;
      }
    }
    if (divided.empty()) return;
    for (const at::Tensor& parameter : ParametersWithGradients(optimizer)) {
      const auto found = divided.find(parameter.grad().unsafeGetTensorImpl());
      if (found == divided.end() || found->second != WrittenOf(parameter)) continue;
      ThrowInvalidScale(
          "the gradient of a parameter of two optimizers was divided by the scale already, with "
          "those of the other optimizer: give the parameter to one of them, or make their steps "
          "one after the other, with update() and zero_grad() between them");
    }
  }

  const GradScalerOptions options;
  const std::shared_ptr<detail::SessionState> given;  // null: the process's own session
  double scale = options.init_scale();
  std::int64_t good_steps = 0;
  // The sets whose ranks all have the same scale and options, and how often they had joined by then.
  std::map<std::uint32_t, std::uint64_t> agreed;
  std::weak_ptr<detail::SessionState> agreed_in;
  std::unordered_map<const torch::optim::Optimizer*, Met> met;  // unscaled since the last update
};

GradScaler::GradScaler(const GradScalerOptions& options)
    : state_(new State{options, detail::SessionScope::Given()}) {
  if (!IsPositive(state_->scale)) {
    ThrowInvalidScale("init_scale is " + std::to_string(state_->scale) + "; it has to be positive");
  }
  if (!IsPositive(options.growth_factor()) || options.growth_factor() <= 1) {
    ThrowInvalidScale("growth_factor is " + std::to_string(options.growth_factor()) +
                      "; it has to be above 1");
  }
  if (!IsPositive(options.backoff_factor()) || options.backoff_factor() >= 1) {
    ThrowInvalidScale("backoff_factor is " + std::to_string(options.backoff_factor()) +
                      "; it has to be between 0 and 1");
  }
  if (options.growth_interval() < 1) {
    ThrowInvalidScale("growth_interval is " + std::to_string(options.growth_interval()) +
                      "; it has to be at least 1");
  }
}

GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;
GradScaler::~GradScaler() = default;

double GradScaler::get_scale() const { return state_->options.enabled() ? state_->scale : 1.0; }

at::Tensor GradScaler::scale(const at::Tensor& tensor) const {
  return state_->options.enabled() ? tensor * state_->scale : tensor;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  state_->AgreeOnSettings(optimizer);
  if (auto* const reducer = detail::ReducerOf(optimizer)) reducer->Synchronize(optimizer);
  if (!state_->options.enabled()) return;
  if (state_->met.count(&optimizer) != 0) {
    ThrowInvalidScale("unscale_() was already called for this optimizer since the last update()");
  }
  CheckTypes(optimizer);
  detail::TensorCall call = detail::CallOf(core::OpKind::kAllReduce,
                                           AllreduceOptions()
                                               .name("sirtaki/GradScaler's check of the gradients")
                                               .process_set(state_->SetFor(optimizer)),
                                           detail::Form::kInPlace);
  call.reduction = core::ReduceOp::kMax;
  try {
    state_->CheckDividedOnce(optimizer);
    call.tensor = detail::Unscale(optimizer, state_->scale);
  } catch (const std::exception& error) {
    call.invalid = "the gradients cannot be unscaled: " + detail::TextOf(error);
  }
  const detail::SessionScope scope(state_->given);
  at::Tensor infinite = detail::RunOne(std::move(call));
  // The other parts of split parameters are on ranks of other sets, which make the step as well or do
  // not.
  const auto agree = [&](const std::string& what, const ProcessSet& set) {
    infinite = allreduce_(infinite, AllreduceOptions()
                                        .op(ReduceOp::Max)
                                        .name("sirtaki/GradScaler's check of " + what)
                                        .process_set(set));
  };
  for (const detail::TensorSplitPtr& split : detail::SplitSetsOf(optimizer)) {
    agree("split gradients", split->set.process_set);
  }
  for (const ProcessSet& row : state_->RowsFor(optimizer)) {
    infinite = infinite.cpu();  // stages may be on several kinds of devices
    agree("the stages of a pipeline", row);
  }
  State::Met& met = state_->met[&optimizer];
  met.infinite.emplace(infinite);
  for (const at::Tensor& parameter : ParametersWithGradients(optimizer)) {
    met.divided.push_back(
        {State::WeakTensor(parameter.grad().getIntrusivePtr()), state_->WrittenOf(parameter)});
  }
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  state_->AgreeOnSettings(optimizer);
  if (!state_->options.enabled()) {
    optimizer.step();
    return true;
  }
  if (state_->met.count(&optimizer) == 0) unscale_(optimizer);
  State::Met& met = state_->met[&optimizer];
  if (met.stepped)
    ThrowInvalidScale("step() was already called for this optimizer since the last update()");
  const bool finite = !met.infinite->Get();
  // What a collective that was broken off has left on a GPU says nothing.
  if (met.infinite->is_of_gpu()) detail::ThrowIfError(detail::StateOf(state_->given)->Check());
  // Optimizers of several process sets may have skipped other steps than those of other ranks.
  if (met.infinite->At(1) != -met.infinite->At(2)) {
    detail::ThrowStatus(core::Status(
        core::StatusCode::kMismatch,
        "GradScaler: the ranks have different scales, from " +
            std::to_string(-met.infinite->At(2)) + " to " + std::to_string(met.infinite->At(1)) +
            ", by which the gradients were divided: call broadcast(), which gives all the same, "
            "and zero_grad(), and backward() anew; optimizers of different process sets take a "
            "scaler each, or one with the process_set of all of them"));
  }
  met.stepped = true;
  if (finite) {
    optimizer.step();
  } else if (auto* const reducer = detail::ReducerOf(optimizer)) {
    reducer->SkipStep();
  }
  return finite;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!state_->options.enabled()) return;
  if (new_scale) {
    if (!IsPositive(*new_scale)) {
      ThrowInvalidScale("the new scale is " + std::to_string(*new_scale) +
                        "; it has to be positive");
    }
    state_->scale = *new_scale;
    state_->met.clear();
    return;
  }
  if (state_->met.empty())
    ThrowInvalidScale("update() needs a step() or unscale_() since the last update()");
  const bool all_finite = std::all_of(state_->met.begin(), state_->met.end(),
                                      [](auto& met) { return !met.second.infinite->Get(); });
  state_->met.clear();
  if (!all_finite) {
    state_->scale *= state_->options.backoff_factor();
    state_->good_steps = 0;
  } else if (++state_->good_steps == state_->options.growth_interval()) {
    state_->good_steps = 0;
    const double grown = state_->scale * state_->options.growth_factor();
    // The loss is float32: a greater scale would make it infinite.
    if (grown <= static_cast<double>(std::numeric_limits<float>::max())) state_->scale = grown;
  }
}

void GradScaler::broadcast(int root_rank) {
  const at::Tensor state =
      at::tensor({state_->scale, static_cast<double>(state_->good_steps)}, at::kDouble);
  const detail::SessionSet set(detail::StateOf(state_->given), state_->options.process_set());
  detail::BroadcastInPlaceBlocking(state, root_rank, "sirtaki/GradScaler", set);
  state_->scale = state[0].item<double>();
  state_->good_steps = static_cast<std::int64_t>(state[1].item<double>());
  state_->met.clear();
}

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("scale", at::full({}, state_->scale, at::kDouble), /*is_buffer=*/true);
  archive.write("good_steps", at::full({}, state_->good_steps, at::kLong), /*is_buffer=*/true);
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  at::Tensor scale;
  at::Tensor good_steps;
  archive.read("scale", scale, /*is_buffer=*/true);
  archive.read("good_steps", good_steps, /*is_buffer=*/true);
  const double saved = scale.item<double>();
  if (!IsPositive(saved)) {
    ThrowInvalidScale("the saved scale is " + std::to_string(saved) + "; it has to be positive");
  }
  state_->scale = saved;
  state_->good_steps = good_steps.item<std::int64_t>();
  state_->met.clear();
}

}  // namespace sirtaki
