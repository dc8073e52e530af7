// A DistributedOptimizer averages the gradients over the ranks before it uses them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <string>
#include <type_traits>
#include <utility>

#include "sirtaki/collectives.h"
#include "sirtaki/detail/gradient_reducer.h"
#include "sirtaki/export.h"
#include "sirtaki/optimizer_options.h"
#include "sirtaki/process_set.h"

namespace sirtaki {

// A DistributedOptimizer is a Base, so that schedulers, param_groups(), torch::save and the rest
// work on it as before:
//
//   torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
//   auto optimizer = sirtaki::DistributedOptimizer(std::move(sgd), model->named_parameters());
//
// The reduction of each gradient starts as soon as backward() has computed it, and runs while
// backward() goes on. Its end waits for all of them: when backward() returns, .grad is the average,
// and what a program does with it (clip it by LibTorch's own functions, look at it, scale it, also
// through .data()) is right. step() would wait no less. The rules:
//
//   - All ranks call backward() equally often before step(), nested alike. Each end, that of an
//     inner backward() too, averages what is in .grad again: with op Average an average plus this
//     rank's new part is exact, so that two losses and retain_graph work. With op Sum, compression
//     or a hook a backward() that would add to an average, that of the step before too, throws
//     InvalidArgument: declare accumulation (backward_passes_per_step, no_sync()), or call
//     zero_grad() before.
//   - A rank whose backward() reaches none of the optimizer's parameters, or that runs none, calls
//     synchronize() right after it, before anything else of the library that waits. If it calls
//     step() instead, all ranks throw `Mismatch`, which names it. Where no rank has run a
//     backward(), or only within no_sync(), step() averages.
//   - One backward() of an optimizer at a time: a second one, on another thread, throws.
//   - A backward() that throws on one rank throws on every rank. Then zero_grad() begins a step.
//   - A gradient that is itself differentiable (backward with create_graph) cannot be averaged
//     without losing its graph: backward() throws on all ranks. Use torch::autograd::grad, or
//     average_at(Average::Step).
//
// With average_at(Average::Step) step() or synchronize() waits instead. Until then gradients must
// not be touched:
//
//   - a second backward() before step() or synchronize() throws InvalidArgument, unless
//     accumulation is declared: backward_passes_per_step, or no_sync(),
//   - so does zero_grad() between backward() and step(). If it is called on the module or through
//     Base&, where the library cannot see it at once, the next backward() or step() throws,
//   - to change the averaged gradients before the step (clipping), call synchronize() first.
//     LibTorch's own clipping without it gives wrong results, and nothing notices: it changes
//     gradients that are still being averaged through a pointer that leaves no trace,
//   - a gradient that is itself differentiable is averaged in a copy, which then replaces it.
//
// A parameter that has no gradient on some ranks counts as zero there; without one on all ranks its
// gradient stays undefined. Graphs may change from step to step and differ between ranks.
//
// A sparse gradient (COO) is gathered from all ranks, indices and values, and added up; the result,
// coalesced, replaces it in .grad. Ranks without the gradient add nothing; if the result has no
// entries at all, the gradient is undefined afterwards. If a gradient is sparse on some ranks and
// dense on others, all ranks throw `Mismatch`. Of LibTorch's optimizers, SGD and Adagrad without
// weight_decay take sparse gradients; sparse_as_dense is for the others, and for a hook.
//
// With op Adasum gradients stay this rank's own, for as many backward() as you like. step() makes
// Base's step with them, then combines the ranks' changes of each parameter by Adasum. Each
// parameter becomes what it was before plus the combined change, the same bits on all ranks. Base's
// other state (momentum, moments) is this rank's own too. A closure and its loss are Base's,
// unchanged. synchronize() and no_sync() have nothing to do; clip_grad_norm_ clips this rank's
// gradients by their own norm. Adasum costs a copy of the parameters during step(), and takes
// floating point only. A step that throws leaves the parameters as they were before it.
//
// With Shard::OptimizerState step() makes Base's step with this rank's shards in the place of the
// parameters, as flat views with a part of .grad, and then gathers the shards of all ranks: every
// rank has the same parameters; with one thread within LibTorch's operators to the bit those of a
// run that is not sharded. The rules:
//
//   - Base works element by element, or gets whole parameters (ShardBy). LBFGS, whose step looks at
//     all parameters at once, and sparse gradients throw InvalidArgument; op Adasum and a module
//     are refused.
//   - Until the first step() the state is whole: load it and broadcast it as before, on all ranks.
//     step() cuts it. From then on state() has entries for this rank's shards alone:
//     broadcast_optimizer_state() gives the groups' options only, and torch::save() throws
//     InvalidArgument. save_checkpoint() writes a file for each rank.
//   - Parameters lie dense in memory, and keep the order in which they do. .grad is the average of
//     the whole: clip it as before. A parameter that leaves the optimizer is kept: it may come back.
//   - A closure is called once, before the step.
//   - Ranks make equally many steps: step() throws InvalidArgument after a rank has joined.
//   - A step that throws on one rank throws on all, and leaves the ranks with different parameters:
//     broadcast_parameters() makes them equal again.
//
// With Shard::Gradients .grad is undefined when gradients are averaged: each rank has its shard of
// them, which clip_grad_norm_ and GradScaler know of, and LibTorch's own clipping does not. A step
// uses the average up, and zero_grad() and skip_step() let it go; another average before that throws
// InvalidArgument on all ranks. A parameter belongs to one optimizer.
//
// With a process set only its ranks make the optimizer, others throw InvalidArgument, and "all
// ranks" below and above are those of the set. Roots stay ranks of the job. Parameters of one model
// may be split over optimizers of several sets; one parameter belongs to one set.
//
// The constructor and step() are collective. Names match the parameters of the ranks, and stand in
// errors. With `named_parameters` all parameters of the optimizer must be in it, each name once; more
// names than the optimizer has parameters are allowed. Without it they are called "parameter 0",
// "parameter 1", …, in the optimizer's order, which must be the same on all ranks. The constructor
// compares names, shapes and types between the ranks; if they differ, all ranks throw `Mismatch`,
// which names the first difference, and `base` is untouched. Make schedulers after
// wrapping: they keep a reference to the optimizer.
//
// Parameters may be added (by all ranks alike), frozen and unfrozen later: zero_grad(),
// synchronize() and step() look for them. Several optimizers may have parts of one model, or the
// same parameters; optimizers of the same parameters need equal options and op Average.
//
// With one rank nothing is reduced and step() is Base's. The rules above are checked all the same,
// so that a mistake shows before the second rank does; with Average::Step there is nothing to check.
template <class Base>
class DistributedOptimizer : public Base, public detail::ReducerOwner {
  static_assert(std::is_base_of_v<torch::optim::Optimizer, Base>,
                "DistributedOptimizer wraps a torch::optim::Optimizer");

 public:
  using LossClosure = torch::optim::Optimizer::LossClosure;

  DistributedOptimizer(Base&& base,
                       const torch::OrderedDict<std::string, at::Tensor>& named_parameters,
                       const DistributedOptimizerOptions& options = {})
      : DistributedOptimizer(std::move(base), named_parameters.pairs(), options) {}

  DistributedOptimizer(Base&& base, const NamedTensors& named_parameters,
                       const DistributedOptimizerOptions& options = {})
      // The reducer is made before `base` is moved from.
      : DistributedOptimizer(std::move(base),
                             detail::GradientReducer(base, named_parameters, options)) {}

  explicit DistributedOptimizer(Base&& base, const DistributedOptimizerOptions& options = {})
      : DistributedOptimizer(std::move(base), detail::NamesByPosition(base), options) {}

  // Calls Base::step() with the averaged gradients, for which it waits if no backward() has. With a
  // closure, which makes the gradients (none may be under way before), each evaluation is followed
  // by synchronize(), and the loss that it returns is averaged over the ranks: the same bits
  // everywhere, so that an optimizer that branches on the loss branches alike. Collective.
  at::Tensor step(LossClosure closure = nullptr) override {
    return reducer_.Step(*this, std::move(closure),
                         [this](LossClosure wrapped) { return Base::step(std::move(wrapped)); });
  }

  // Waits until all gradients are averaged; does nothing after a backward() that has averaged them.
  // The following step() takes them as they then are. A backward() in between adds to them (on every
  // rank, or on none) and has them averaged again. Collective.
  void synchronize() { reducer_.Synchronize(*this); }

  // Calls Base's zero_grad(), but throws InvalidArgument if gradients are being reduced.
  void zero_grad(bool set_to_none = true) {
    reducer_.BeforeZeroGrad(*this);
    Base::zero_grad(set_to_none);
  }

  // While the returned Scope lives, backward() only adds to the gradients of this rank. They are
  // reduced with those of the first backward() after it, or by step():
  //
  //   { auto hold = optimizer.no_sync(); loss_of(batch1).backward(); }
  //   loss_of(batch2).backward();
  //   optimizer.step();
  //
  // All ranks must do it alike.
  [[nodiscard]] detail::Scope no_sync() { return reducer_.NoSync(); }

  // While the returned Scope lives, step() is Base's: it takes the gradients as they are on this
  // rank. Not needed after synchronize(). step() then throws InvalidArgument if gradients are
  // being reduced, and with a closure. skip_synchronize() throws InvalidArgument with op Adasum.
  [[nodiscard]] detail::Scope skip_synchronize() { return reducer_.SkipSynchronize(); }

  // Begins a new step after one that the program leaves out. It is needed if synchronize() was
  // called for that step and zero_grad() of this optimizer will not be: the following backward()
  // then belong to a new step.
  void skip_step() { reducer_.SkipStep(); }

  // Throws InvalidArgument if this rank has the state of its shards only.
  void save(torch::serialize::OutputArchive& archive) const override {
    reducer_.CheckStateIsWhole();
    Base::save(archive);
  }
  // Loads state of whole parameters. LibTorch adds it to what is there; of shards nothing stays.
  void load(torch::serialize::InputArchive& archive) override {
    if (reducer_.has_sharded_state()) this->state().clear();
    reducer_.set_sharded_state(false);
    Base::load(archive);
  }

  detail::GradientReducer& reducer() override { return reducer_; }

 private:
  DistributedOptimizer(Base&& base, detail::GradientReducer&& reducer)
      : Base(std::move(base)), reducer_(std::move(reducer)) {}

  detail::GradientReducer reducer_;
};

// Waits for the averaged gradients of a DistributedOptimizer (for another optimizer it does not
// wait), then scales them so that their norm, over all parameters of all groups together, is at
// most `max_norm`, and returns the norm that they had. `norm_type` is 2, 1, infinity or another p.
// Throws InvalidArgument if `max_norm` is negative, and with `error_if_nonfinite` if that norm is
// not finite; without it such gradients are scaled all the same. Sparse gradients count with their
// values, coalesced. For a DistributedOptimizer it is collective, and the norm is that of the
// lowest of its ranks that has not joined, so that all scale alike to the bit; with op Adasum each
// rank has its own.
SIRTAKI_API double clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                                   double norm_type = 2.0, bool error_if_nonfinite = false);

}  // namespace sirtaki
