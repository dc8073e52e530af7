// GradScaler scales the loss for training in float16: it keeps small gradients from becoming zero,
// and all ranks together skip steps with infinite gradients. bfloat16 does not need it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "sirtaki/export.h"
#include "sirtaki/process_set.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace sirtaki {

// The options are the same on every rank: the first step compares them, and throws Mismatch if they
// are not.
struct GradScalerOptions {
  TORCH_ARG(double, init_scale) = 65536.0;  // positive
  // The scale is multiplied by `growth_factor`, which is above 1, after `growth_interval` steps in
  // a row without infinite or NaN gradients, and by `backoff_factor`, between 0 and 1, after a step
  // with them.
  TORCH_ARG(double, growth_factor) = 2.0;
  TORCH_ARG(double, backoff_factor) = 0.5;
  TORCH_ARG(std::int64_t, growth_interval) = 2000;  // at least 1
  // The ranks of this set skip steps together. Default: those of the DistributedOptimizer that
  // steps, all ranks with any other optimizer. If optimizers of several sets share a scaler, give
  // it a set that has the ranks of all of them, or their scales may drift apart, which step() finds;
  // the stages of a Pipeline, and the parts of split layers, skip steps together in any case.
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(bool, enabled) = true;  // false: scale() is the identity, step() is the optimizer's
};

// A GradScaler stands between the loss, the optimizer and the step:
//
//   sirtaki::GradScaler scaler;
//   for (auto& batch : *loader) {
//     optimizer.zero_grad();
//     scaler.scale(loss_of(batch)).backward();
//     scaler.unscale_(optimizer);                // only if the program looks at gradients
//     sirtaki::clip_grad_norm_(optimizer, 1.0);  // before the step
//     scaler.step(optimizer);
//     scaler.update();
//   }
//
// Gradients are averaged while they are scaled, and divided by the scale afterwards. The ranks
// agree on whether the gradients are finite: every rank skips the step or none does, also if
// gradients are not averaged. One thread uses a GradScaler.
class SIRTAKI_API GradScaler {
 public:
  // Throws InvalidArgument for options that are not allowed. Not collective.
  explicit GradScaler(const GradScalerOptions& options = {});
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;
  ~GradScaler();

  // Returns the tensor times the scale; autograd sees it.
  at::Tensor scale(const at::Tensor& tensor) const;

  // Waits for the averaged gradients if the optimizer is a DistributedOptimizer, divides the
  // gradients by the scale and agrees with the other ranks on whether they are finite. Collective;
  // at most once for an optimizer between two update(). Throws InvalidArgument for float16
  // parameters: keep them in float32 or wider. An optimizer is known by its address: it must not be
  // moved between two update(). Gradients on GPUs are divided in the current streams; the program
  // does not wait for that.
  void unscale_(torch::optim::Optimizer& optimizer);

  // Calls unscale_() if the program has not, then the optimizer's step(), unless a gradient of any
  // rank is infinite or NaN. Returns true if it stepped. Collective; once for an optimizer between
  // two update(). Throws Mismatch if the ranks have different scales. With gradients
  // on GPUs it waits until it is known there whether they are finite.
  bool step(torch::optim::Optimizer& optimizer);

  // Adapts the scale to what the steps since the last update() have met, or takes `new_scale` as
  // the scale. Throws InvalidArgument if there was no step and no value, or if the value is not
  // positive. Not collective.
  void update(std::optional<double> new_scale = std::nullopt);

  double get_scale() const;

  // The call takes the scale of `root_rank`, a rank of the job, and for how many steps it has been good.
  // It is needed where the ranks have made different numbers of steps: after a join(). Collective over
  // the options' process set; throws what broadcast_() throws.
  void broadcast(int root_rank);

  // The archive holds the scale, and for how many steps it has been good.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sirtaki
