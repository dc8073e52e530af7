// The reduction of gradients for Python's optimizers and modules, which are no torch::optim and no
// torch::nn of C++: detail::GradientReducer with what these have.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include "sirtaki/optimizer.h"

namespace sirtaki::python {

// What Python's arguments come to.
struct ReducerSettings {
  NamedTensors named;
  DistributedOptimizerOptions options;
};

// A Python optimizer as the library sees it: parameters in groups, and how they are synchronized.
// Its steps are Python's. Used by the thread that uses the optimizer, with the interpreter's lock,
// which the calls let go while they wait; `param_groups` is the optimizer's.
class PythonOptimizer : public torch::optim::Optimizer, public detail::ReducerOwner {
 public:
  // Collective.
  PythonOptimizer(const pybind11::list& param_groups, ReducerSettings settings);
  ~PythonOptimizer() override;
  PythonOptimizer(const PythonOptimizer&) = delete;
  PythonOptimizer& operator=(const PythonOptimizer&) = delete;

  // What `base_step(closure, shards)` has returned, or the closure. `closure` may be none. `shards`:
  // none, or what has to be in the place of parameters during the step: (parameter, shard, first
  // element) each; of other parameters this rank has nothing.
  pybind11::object Step(const pybind11::list& param_groups, const pybind11::object& closure,
                        const pybind11::object& base_step);
  // What a step would have in the place of the parameters now; none where it would have all of them.
  pybind11::object Shards(const pybind11::list& param_groups);
  void Synchronize(const pybind11::list& param_groups);
  void BeforeZeroGrad(const pybind11::list& param_groups);
  // Takes over parameters that came or went since the last time; cheap if none has.
  void Follow(const pybind11::list& param_groups);
  // Waits, then clips all gradients together; see clip_grad_norm_.
  double ClipGradNorm(const pybind11::list& param_groups, double max_norm, double norm_type,
                      bool error_if_nonfinite);
  detail::GradientReducer& reducer() override { return *reducer_; }
  at::Tensor step(LossClosure closure) override;  // throws: steps are Python's

 private:
  // The parameters that were seen last, to be compared and not to be looked into: param_groups_
  // keeps them alive.
  std::vector<std::vector<const PyObject*>> seen_;
  std::unique_ptr<detail::GradientReducer> reducer_;
};

// A ModuleReducer has no optimizer: gradients are averaged when backward() returns.
class ModuleReducer {
 public:
  explicit ModuleReducer(ReducerSettings settings);  // collective
  ~ModuleReducer();
  ModuleReducer(const ModuleReducer&) = delete;
  ModuleReducer& operator=(const ModuleReducer&) = delete;

  void BeforeForward(bool training) { reducer_->BeforeForward(training); }
  void BeginBackward() { reducer_->BeginBackward(); }
  detail::Scope NoSync() { return reducer_->NoSync(); }
  std::string prefix() const { return reducer_->prefix(); }

 private:
  std::unique_ptr<detail::GradientReducer> reducer_;
};

}  // namespace sirtaki::python
