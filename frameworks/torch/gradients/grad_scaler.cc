#include "sirtaki/grad_scaler.h"

#include <ATen/ops/full.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <sstream>
#include <string>
#include <utility>

#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/call_forms.h"
#include "frameworks/torch/gradients/gradient_unscaling.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/reductions.h"

namespace sirtaki {
namespace {

[[noreturn]] void ThrowInvalidScale(const std::string& text) {
  detail::ThrowStatus(core::Status(core::StatusCode::kInvalidArgument, "GradScaler: " + text));
}

bool IsPositive(double value) { return std::isfinite(value) && value > 0; }

// By the parameters, which all ranks have alike, not by what gradients this one has.
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

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options, const Session& session)
    : options_(options), session_(session), scale_(options.init_scale()) {
  if (!IsPositive(scale_)) {
    ThrowInvalidScale("init_scale is " + std::to_string(scale_) + "; it has to be positive");
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

at::Tensor GradScaler::scale(const at::Tensor& tensor) const {
  return options_.enabled() ? tensor * scale_ : tensor;
}

ProcessSet GradScaler::SetFor(const torch::optim::Optimizer& optimizer) const {
  if (options_.process_set().membership()) return options_.process_set();
  const auto* const synchronizer = dynamic_cast<const detail::GradientSynchronizer*>(&optimizer);
  return synchronizer != nullptr ? synchronizer->process_set() : ProcessSet();
}

// Scales that differ would make gradients that differ, without a word.
void GradScaler::AgreeOnSettings(const ProcessSet& set) {
  if (agreed_.count(set.id()) != 0) return;
  std::ostringstream settings;
  settings.precision(17);
  settings << "scale " << scale_ << ", growth by " << options_.growth_factor() << " after "
           << options_.growth_interval() << " steps, " << good_steps_
           << " of them made, backoff by " << options_.backoff_factor();
  detail::AgreeOnList("GradScaler", {options_.enabled() ? settings.str() : "disabled"}, "",
                      detail::SessionSet(detail::StateOf(session_), set));
  agreed_.insert(set.id());
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  const ProcessSet set = SetFor(optimizer);
  AgreeOnSettings(set);
  if (auto* const synchronizer = dynamic_cast<detail::GradientSynchronizer*>(&optimizer)) {
    synchronizer->synchronize();
  }
  if (!options_.enabled()) return;
  if (met_.count(&optimizer) != 0) {
    ThrowInvalidScale("unscale_() was already called for this optimizer since the last update()");
  }
  CheckTypes(optimizer);
  detail::TensorCall call = detail::CallOf(
      core::OpKind::kAllReduce,
      AllreduceOptions().name("sirtaki/GradScaler's check of the gradients").process_set(set),
      detail::Form::kInPlace);
  try {
    call.tensor = detail::Unscale(optimizer, scale_);
  } catch (const std::exception& error) {
    call.invalid = "the gradients cannot be unscaled: " + detail::TextOf(error);
  }
  const at::Tensor infinite = detail::RunOne(std::move(call), session_);
  met_[&optimizer].infinite = std::make_shared<detail::LateFlag>(infinite);
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  AgreeOnSettings(SetFor(optimizer));
  if (!options_.enabled()) {
    optimizer.step();
    return true;
  }
  if (met_.count(&optimizer) == 0) unscale_(optimizer);
  Met& met = met_[&optimizer];
  if (met.stepped)
    ThrowInvalidScale("step() was already called for this optimizer since the last update()");
  const bool finite = !met.infinite->Get();
  // What a collective that was broken off has left on a GPU says nothing.
  if (met.infinite->is_of_gpu()) detail::ThrowIfError(detail::StateOf(session_)->Check());
  met.stepped = true;
  if (finite) {
    optimizer.step();
  } else if (auto* const synchronizer = dynamic_cast<detail::GradientSynchronizer*>(&optimizer)) {
    synchronizer->skip_step();
  }
  return finite;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled()) return;
  if (new_scale) {
    if (!IsPositive(*new_scale)) {
      ThrowInvalidScale("the new scale is " + std::to_string(*new_scale) +
                        "; it has to be positive");
    }
    scale_ = *new_scale;
    agreed_.clear();
    met_.clear();
    return;
  }
  if (met_.empty())
    ThrowInvalidScale("update() needs a step() or unscale_() since the last update()");
  const bool all_finite = std::all_of(met_.begin(), met_.end(),
                                      [](const auto& met) { return !met.second.infinite->Get(); });
  met_.clear();
  if (!all_finite) {
    scale_ *= options_.backoff_factor();
    good_steps_ = 0;
  } else if (++good_steps_ == options_.growth_interval()) {
    good_steps_ = 0;
    const double grown = scale_ * options_.growth_factor();
    // The loss is float32: a greater scale would make it infinite.
    if (grown <= static_cast<double>(std::numeric_limits<float>::max())) scale_ = grown;
  }
}

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("scale", at::full({}, scale_, at::kDouble), /*is_buffer=*/true);
  archive.write("good_steps", at::full({}, good_steps_, at::kLong), /*is_buffer=*/true);
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
  scale_ = saved;
  good_steps_ = good_steps.item<std::int64_t>();
  agreed_.clear();
  met_.clear();
}

}  // namespace sirtaki
