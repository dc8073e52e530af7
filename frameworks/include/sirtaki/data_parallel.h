// DistributedDataParallel is a module that averages its gradients over the ranks, for programs that
// wrap the model and not the optimizer.
#pragma once

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <utility>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/movement.h"
#include "sirtaki/optimizer.h"

namespace sirtaki {

struct DistributedDataParallelOptions {
  // Says how gradients are reduced, and on which process set, which is then the set of the whole
  // module. backward_passes_per_step stays 1; op Adasum, average_at Step, shards and fused throw
  // InvalidArgument.
  TORCH_ARG(DistributedOptimizerOptions, gradients);
  // If true, the constructor and each forward() in training, with autograd on, first give all ranks
  // the buffers of the lowest rank, so that running statistics do not drift apart. A forward() in
  // evaluation does not: ranks may evaluate differently often. If false, each rank has buffers of its
  // own.
  TORCH_ARG(bool, broadcast_buffers) = true;
};

namespace detail {

// Gives all ranks of the set the root's buffers, each once where several share memory. Collective.
SIRTAKI_API void BroadcastBuffers(const std::vector<at::Tensor>& buffers, int root_rank,
                                  const BroadcastOptions& options);

// The part of DistributedDataParallel that does not depend on the module's type.
class SIRTAKI_API ModuleSynchronizer {
 public:
  ModuleSynchronizer(const std::shared_ptr<torch::nn::Module>& module,
                     const DistributedDataParallelOptions& options);
  ~ModuleSynchronizer();

  void BeforeForward();
  Scope NoSync();
  // The job is over, and another one was joined: see GradientReducer. Renew() broadcasts nothing.
  void Leave();
  void Renew();
  const DistributedDataParallelOptions& options() const { return options_; }

 private:
  class Impl;
  Impl& impl() const;
  std::shared_ptr<torch::nn::Module> module_;
  DistributedDataParallelOptions options_;
  std::shared_ptr<Impl> impl_;
};

// A DistributedDataParallel is one, whatever its module.
class SIRTAKI_API SynchronizerOwner {
 public:
  virtual ~SynchronizerOwner();
  virtual ModuleSynchronizer& synchronizer() = 0;

 protected:
  SynchronizerOwner() = default;
  SynchronizerOwner(SynchronizerOwner&&) noexcept = default;
  SynchronizerOwner(const SynchronizerOwner&) = default;
  SynchronizerOwner& operator=(SynchronizerOwner&&) noexcept = default;
  SynchronizerOwner& operator=(const SynchronizerOwner&) = default;
};

}  // namespace detail

// A DistributedDataParallel wraps a module and averages its gradients in backward():
//
//   auto model = sirtaki::DistributedDataParallel(std::make_shared<Net>());
//   torch::optim::SGD optimizer(model.parameters(), 0.1);  // any optimizer, as it is
//   for (...) {
//     optimizer.zero_grad();
//     loss_of(model.forward(batch)).backward();  // averages the gradients before it returns
//     optimizer.step();
//   }
//
// The constructor is collective: it compares names, shapes and types, then broadcasts parameters
// and buffers from the lowest rank. Gradients are reduced while backward() runs, and backward()
// returns when all are averaged, an inner backward() too. Each rank calls backward() equally often
// after a forward(), nested alike, through at least one parameter, on one thread at a time. With op
// Sum, compression or a hook it must not add to an average: call zero_grad() before. A backward()
// that throws on one rank throws on every rank; the next forward() ends what it has left. A gradient
// that is itself differentiable (backward with create_graph) is an error. On a GPU backward() waits
// on the one thread that autograd has for that GPU: if several threads of a program train modules
// on one GPU, all ranks must call backward() one after the other, in the same order. Parameters
// without a gradient and frozen ones are treated as DistributedOptimizer treats them; the module
// must not get more parameters later. After shutdown() forward() with autograd on throws: nothing
// would be averaged.
//
// The optimizer must not be a DistributedOptimizer, which would average again. LBFGS does not work:
// the loss that its closure returns would have to be averaged too.
template <class M>
class DistributedDataParallel : public torch::nn::Module, public detail::SynchronizerOwner {
 public:
  explicit DistributedDataParallel(std::shared_ptr<M> module,
                                   const DistributedDataParallelOptions& options = {})
      : module_(register_module("module", std::move(module))), synchronizer_(module_, options) {}

  explicit DistributedDataParallel(const torch::nn::ModuleHolder<M>& module,
                                   const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(module.ptr(), options) {}

  template <class... Args>
  auto forward(Args&&... args) {
    synchronizer_.BeforeForward();
    return module_->forward(std::forward<Args>(args)...);
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // Returns the module itself, for its other functions and for saving it.
  const std::shared_ptr<M>& module() const { return module_; }
  M* operator->() const { return module_.get(); }

  // While the returned Scope lives, backward() only adds to the gradients of this rank, and
  // forward() broadcasts no buffers; the next backward() reduces the sums. All ranks must do it
  // alike.
  [[nodiscard]] detail::Scope no_sync() { return synchronizer_.NoSync(); }

  detail::ModuleSynchronizer& synchronizer() override { return synchronizer_; }

 private:
  std::shared_ptr<M> module_;
  detail::ModuleSynchronizer synchronizer_;
};

}  // namespace sirtaki
