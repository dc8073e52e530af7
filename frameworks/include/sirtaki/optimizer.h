// An optimizer that averages the gradients over the ranks before it uses them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/session.h"

namespace sirtaki {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

namespace detail {

// The part of DistributedOptimizer that does not depend on the optimizer's type: hooks in the
// autograd graph that start the reduction of each gradient, and the wait for all of them.
//
// Owned by its optimizer, movable with it. Hooks run on the threads that call backward(), also
// several at once; everything else is called by the thread that uses the optimizer.
class SIRTAKI_API GradientReducer {
 public:
  // Compares the parameters with those of the other ranks (collective), then attaches the hooks.
  // Throws on every rank if any rank's parameters do not fit.
  GradientReducer(const torch::optim::Optimizer& optimizer, NamedTensors named_parameters,
                  const Session& session);
  GradientReducer(GradientReducer&&) noexcept;
  GradientReducer& operator=(GradientReducer&&) noexcept;
  ~GradientReducer();  // takes the hooks away

  // Throws if the session is gone. Returns at once if the gradients are averaged already, or if
  // they are still to be made by a closure.
  void BeforeStep(bool with_closure);
  void AfterStep();
  void Synchronize();
  void CheckZeroGrad() const;
  // What step(closure) hands to the optimizer: the closure, with gradients and loss averaged.
  std::function<at::Tensor()> Wrap(std::function<at::Tensor()> closure);

 private:
  class Impl;
  Impl& impl() const;  // throws if moved from
  std::shared_ptr<Impl> impl_;
};

}  // namespace detail

// Is a Base, so that schedulers, param_groups(), torch::save and the rest work on it as before:
//
//   torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
//   auto optimizer = sirtaki::DistributedOptimizer(std::move(sgd), model->named_parameters());
//
// Each gradient's reduction (average) starts as soon as backward() has computed it, and runs while
// backward() goes on; step() waits for all of them. Until then gradients must not be touched:
//   - a second backward() before step() or synchronize() throws invalid_argument,
//   - so does zero_grad() between backward() and step().
// To change the averaged gradients before the step (clipping), call synchronize() first.
//
// A parameter that has no gradient on some ranks counts as zero there; without one on all ranks its
// gradient stays undefined. Sparse gradients are not supported in this version.
//
// Making one is collective. All parameters of the optimizer must be in `named_parameters`, each
// name once; more names than the optimizer has parameters are fine. Names, shapes and types are
// compared between the ranks, and the first difference is thrown as `mismatch` on all of them;
// `base` is then untouched. Make schedulers after wrapping: they keep a reference to the optimizer.
//
// With one rank there are no hooks and step() is Base's; none of the checks above that need a
// second rank is made.
template <class Base>
class DistributedOptimizer : public Base {
  static_assert(std::is_base_of_v<torch::optim::Optimizer, Base>,
                "DistributedOptimizer wraps a torch::optim::Optimizer");

 public:
  using LossClosure = torch::optim::Optimizer::LossClosure;

  DistributedOptimizer(Base&& base,
                       const torch::OrderedDict<std::string, at::Tensor>& named_parameters,
                       const Session& session = {})
      : DistributedOptimizer(std::move(base), named_parameters.pairs(), session) {}

  DistributedOptimizer(Base&& base, const NamedTensors& named_parameters,
                       const Session& session = {})
      // The reducer is made before `base` is moved from.
      : DistributedOptimizer(std::move(base),
                             detail::GradientReducer(base, named_parameters, session)) {}

  // Waits for the averaged gradients, then Base::step(). With a closure, each evaluation of it is
  // followed by synchronize(), and the loss it returns is averaged over the ranks.
  at::Tensor step(LossClosure closure = nullptr) override {
    reducer_.BeforeStep(closure != nullptr);
    at::Tensor loss =
        Base::step(closure ? LossClosure(reducer_.Wrap(std::move(closure))) : nullptr);
    reducer_.AfterStep();
    return loss;
  }

  // Waits until all gradients are averaged. The following step() takes them as they then are.
  void synchronize() { reducer_.Synchronize(); }

  // Base's, but throws invalid_argument if gradients are being reduced.
  void zero_grad(bool set_to_none = true) {
    reducer_.CheckZeroGrad();
    Base::zero_grad(set_to_none);
  }

 private:
  DistributedOptimizer(Base&& base, detail::GradientReducer&& reducer)
      : Base(std::move(base)), reducer_(std::move(reducer)) {}

  detail::GradientReducer reducer_;
};

}  // namespace sirtaki
