// An optimizer that averages the gradients over the ranks before it uses them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "sirtaki/collectives.h"
#include "sirtaki/compression.h"
#include "sirtaki/export.h"
#include "sirtaki/gradient_bucket.h"
#include "sirtaki/session.h"

namespace sirtaki {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// The same on every rank; what differs is thrown as `mismatch` on all of them.
struct DistributedOptimizerOptions {
  // Tells several optimizers of a program apart, in messages too. Empty: by a number, in the order
  // in which they are made.
  TORCH_ARG(std::string, name);
  // Average or Sum. With Sum let gradients go (zero_grad) before each backward(): what is in them
  // already is on all ranks, and would be added up anew.
  TORCH_ARG(ReduceOp, op) = ReduceOp::Average;
  // With Average: gradients are divided by this before they are added up, and by size() / this
  // afterwards. Between 1 and size() it keeps large sums in the range of half types. Positive.
  TORCH_ARG(double, gradient_predivide_factor) = 1.0;
  // A gradient is reduced when so many backward() have added to it. As in one process the passes
  // add up: divide the losses by their number for the mean. step() reduces what has had fewer.
  TORCH_ARG(int, backward_passes_per_step) = 1;
  // What float32 and float64 gradients travel as.
  TORCH_ARG(Compression, compression) = Compression::None;
  TORCH_ARG(CompressionScope, compression_scope) = CompressionScope::BetweenHosts;
  // Reduces the gradients instead of the library; needs the default op, factor and compression. Not
  // called with one rank.
  TORCH_ARG(CommunicationHook, hook);
  // Before the first step, and then before every so many, check_parameters() compares the
  // optimizer's parameters between the ranks. 0: never.
  TORCH_ARG(std::int64_t, check_parameters_every) = 0;
};

namespace detail {

// What is the same of every DistributedOptimizer, whatever its Base.
class SIRTAKI_API GradientSynchronizer {
 public:
  virtual ~GradientSynchronizer();
  // Waits until all gradients are averaged. The following step() takes them as they then are.
  virtual void synchronize() = 0;
  // No step() will use them.
  virtual void skip_step() = 0;
  // The one that it was made in.
  virtual Session session() const = 0;

 protected:
  GradientSynchronizer() = default;
  GradientSynchronizer(GradientSynchronizer&&) noexcept = default;
  GradientSynchronizer& operator=(GradientSynchronizer&&) noexcept = default;
};

// Keeps something up until it is destroyed.
class SIRTAKI_API Scope {
 public:
  explicit Scope(std::function<void()> end) : end_(std::move(end)) {}
  Scope(Scope&& other) noexcept : end_(std::exchange(other.end_, nullptr)) {}
  Scope& operator=(Scope&&) = delete;
  ~Scope() {
    if (end_) end_();
  }

 private:
  std::function<void()> end_;
};

// The part of DistributedOptimizer that does not depend on the optimizer's type: hooks in the
// autograd graph that start the reduction of each gradient, and the wait for all of them.
//
// Owned by its optimizer, movable with it. Hooks run on the threads that call backward(), also
// several at once; everything else is called by the thread that uses the optimizer.
class SIRTAKI_API GradientReducer {
 public:
  // Compares parameters and options with those of the other ranks (collective), then attaches the
  // hooks. Throws on every rank if any rank's do not fit.
  GradientReducer(const torch::optim::Optimizer& optimizer, NamedTensors named_parameters,
                  const DistributedOptimizerOptions& options, const Session& session);
  // Of these parameters, without an optimizer: gradients are averaged when backward() returns.
  GradientReducer(NamedTensors parameters, const DistributedOptimizerOptions& options,
                  const Session& session);
  GradientReducer(GradientReducer&&) noexcept;
  GradientReducer& operator=(GradientReducer&&) noexcept;
  ~GradientReducer();  // takes the hooks away

  // Throws if the session is gone. Returns at once if the gradients are averaged already, or if
  // they are still to be made by a closure.
  void BeforeStep(const torch::optim::Optimizer& optimizer, bool with_closure);
  void AfterStep();
  void Synchronize(const torch::optim::Optimizer& optimizer);
  // Throws while gradients are being reduced; then looks for parameters that are new.
  void BeforeZeroGrad(const torch::optim::Optimizer& optimizer);
  // What step(closure) hands to the optimizer: the closure, with gradients and loss averaged.
  std::function<at::Tensor()> Wrap(std::function<at::Tensor()> closure);
  Scope NoSync();
  Scope SkipSynchronize();
  // Without an optimizer: looks for parameters that were unfrozen, and ends what a backward() that
  // failed has left. Nothing within a backward().
  void BeforeForward();
  Session session() const;
  const std::string& prefix() const;  // of the names of its collectives

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
// Each gradient's reduction starts as soon as backward() has computed it, and runs while backward()
// goes on; step() waits for all of them. Until then gradients must not be touched:
//   - a second backward() before step() or synchronize() throws invalid_argument, unless
//     accumulation is declared: backward_passes_per_step, or no_sync(),
//   - so does zero_grad() between backward() and step(); called on the module or through Base&,
//     where nobody can see it at once, it is thrown by the next backward() or step().
// To change the averaged gradients before the step (clipping), call synchronize() first.
//
// A parameter that has no gradient on some ranks counts as zero there; without one on all ranks its
// gradient stays undefined. Graphs may change from step to step and differ between ranks. Sparse
// gradients are not supported in this version. A gradient that is itself differentiable
// (backward with create_graph) is averaged in a copy, which then replaces it in .grad.
//
// Making one is collective. All parameters of the optimizer must be in `named_parameters`, each
// name once; more names than the optimizer has parameters are fine. Names, shapes and types are
// compared between the ranks, and the first difference is thrown as `mismatch` on all of them;
// `base` is then untouched. Make schedulers after wrapping: they keep a reference to the optimizer.
//
// Parameters may be added (by all ranks alike), frozen and unfrozen later: zero_grad(),
// synchronize() and step() look for them. Several optimizers may have parts of one model, or the
// same parameters; these need equal options and op Average.
//
// With one rank there are no hooks and step() is Base's; none of the checks above that need a
// second rank is made.
template <class Base>
class DistributedOptimizer : public Base, public detail::GradientSynchronizer {
  static_assert(std::is_base_of_v<torch::optim::Optimizer, Base>,
                "DistributedOptimizer wraps a torch::optim::Optimizer");

 public:
  using LossClosure = torch::optim::Optimizer::LossClosure;

  DistributedOptimizer(Base&& base,
                       const torch::OrderedDict<std::string, at::Tensor>& named_parameters,
                       const DistributedOptimizerOptions& options = {}, const Session& session = {})
      : DistributedOptimizer(std::move(base), named_parameters.pairs(), options, session) {}

  DistributedOptimizer(Base&& base, const NamedTensors& named_parameters,
                       const DistributedOptimizerOptions& options = {}, const Session& session = {})
      // The reducer is made before `base` is moved from.
      : DistributedOptimizer(std::move(base),
                             detail::GradientReducer(base, named_parameters, options, session)) {}

  // Waits for the averaged gradients, then Base::step(). With a closure, which makes the gradients
  // (none may be under way before), each evaluation of it is followed by synchronize(), and the
  // loss it returns is averaged over the ranks: the same bits everywhere, so that an optimizer that
  // branches on it branches alike.
  at::Tensor step(LossClosure closure = nullptr) override {
    reducer_.BeforeStep(*this, closure != nullptr);
    at::Tensor loss =
        Base::step(closure ? LossClosure(reducer_.Wrap(std::move(closure))) : nullptr);
    reducer_.AfterStep();
    return loss;
  }

  // Waits until all gradients are averaged. The following step() takes them as they then are. A
  // backward() in between adds to them (on every rank, or on none) and has them averaged again.
  void synchronize() override { reducer_.Synchronize(*this); }

  // Base's, but throws invalid_argument if gradients are being reduced.
  void zero_grad(bool set_to_none = true) {
    reducer_.BeforeZeroGrad(*this);
    Base::zero_grad(set_to_none);
  }

  // While what it returns lives, backward() only adds to the gradients of this rank; they are
  // reduced with those of the first backward() after it, or by step():
  //
  //   { auto hold = optimizer.no_sync(); loss_of(batch1).backward(); }
  //   loss_of(batch2).backward();
  //   optimizer.step();
  //
  // All ranks alike.
  [[nodiscard]] detail::Scope no_sync() { return reducer_.NoSync(); }

  // While what it returns lives, step() is Base's: it takes the gradients as they are on this rank.
  // Not needed after synchronize(). It throws invalid_argument if gradients are being reduced, and
  // with a closure.
  [[nodiscard]] detail::Scope skip_synchronize() { return reducer_.SkipSynchronize(); }

  // After a step that a program leaves out, when synchronize() was called for it and zero_grad() of
  // this optimizer will not be: the following backward() are a new step's.
  void skip_step() override { reducer_.AfterStep(); }

  Session session() const override { return reducer_.session(); }

 private:
  DistributedOptimizer(Base&& base, detail::GradientReducer&& reducer)
      : Base(std::move(base)), reducer_(std::move(reducer)) {}

  detail::GradientReducer reducer_;
};

// Waits for the averaged gradients of a DistributedOptimizer (of another one nothing is waited
// for), then scales them so that their norm, over all parameters of all groups together, is at most
// `max_norm`, and returns the norm that they had. `norm_type`: 2, 1, infinity or another p.
// `error_if_nonfinite`: throws if that norm is not finite, else such gradients are scaled all the
// same. For a DistributedOptimizer the norm is rank 0's, so that all ranks scale alike to the bit.
SIRTAKI_API double clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                                   double norm_type = 2.0, bool error_if_nonfinite = false);

}  // namespace sirtaki
