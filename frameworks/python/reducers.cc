#include "frameworks/python/reducers.h"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <stdexcept>
#include <utility>

#include "frameworks/python/handle.h"

namespace sirtaki::python {
namespace {

namespace py = pybind11;
using LossClosure = torch::optim::Optimizer::LossClosure;

// A closure may return a number, or nothing, in a tensor's place. The optimizer gets the same kind.
enum class LossKind : unsigned char { kTensor, kNumber, kNothing };

at::Tensor LossOf(const py::object& returned, LossKind* kind) {
  *kind = LossKind::kNothing;
  if (returned.is_none()) return at::zeros({});
  *kind = LossKind::kTensor;
  if (THPVariable_Check(returned.ptr())) return py::cast<at::Tensor>(returned);
  *kind = LossKind::kNumber;
  return at::scalar_tensor(py::cast<double>(returned), at::kDouble);
}

py::object FromLoss(const at::Tensor& loss, LossKind kind) {
  if (kind == LossKind::kNothing) return py::none();
  if (kind == LossKind::kNumber) return py::float_(loss.item<double>());
  return py::cast(loss);
}

LossClosure Callable(const py::object& closure, LossKind* kind) {
  if (closure.is_none()) return nullptr;
  // Step() keeps the closure: this has a reference to it, which needs no lock to be copied.
  return [&closure, kind] {
    const py::gil_scoped_acquire acquire;
    return LossOf(closure(), kind);
  };
}

py::object ToPython(LossClosure closure, const LossKind* kind) {
  if (!closure) return py::none();
  return py::cpp_function([closure = std::move(closure), kind] {
    at::Tensor loss;
    {
      const py::gil_scoped_release release;
      loss = closure();
    }
    return FromLoss(loss, *kind);
  });
}

std::vector<std::vector<const PyObject*>> ObjectsOf(const py::list& param_groups) {
  std::vector<std::vector<const PyObject*>> objects;
  objects.reserve(param_groups.size());
  for (const py::handle group : param_groups) {
    std::vector<const PyObject*>& of_group = objects.emplace_back();
    const py::list params = group["params"];
    of_group.reserve(params.size());
    for (const py::handle parameter : params) of_group.push_back(parameter.ptr());
  }
  return objects;
}

py::list ToPython(const std::vector<detail::ShardOfParameter>& shards) {
  py::list all;
  for (const auto& of : shards) {
    all.append(py::make_tuple(of.parameter, of.shard, of.begin, of.has_average));
  }
  return all;
}

}  // namespace

PythonOptimizer::PythonOptimizer(const py::list& param_groups, ReducerSettings settings)
    : torch::optim::Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), nullptr) {
  Follow(param_groups);
  const py::gil_scoped_release release;
  reducer_ =
      std::make_unique<detail::GradientReducer>(*this, std::move(settings.named), settings.options);
}

// The hooks of the reducer may be at work: they must not wait for the interpreter's lock.
PythonOptimizer::~PythonOptimizer() {
  const py::gil_scoped_release release;
  reducer_.reset();
}

void PythonOptimizer::Follow(const py::list& param_groups) {
  std::vector<std::vector<const PyObject*>> objects = ObjectsOf(param_groups);
  if (objects == seen_) return;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const py::handle group : param_groups) {
    std::vector<at::Tensor> parameters;
    for (const py::handle parameter : py::list(group["params"])) {
      parameters.push_back(py::cast<at::Tensor>(parameter));
    }
    groups.emplace_back(std::move(parameters));
  }
  param_groups_ = std::move(groups);
  seen_ = std::move(objects);
}

py::object PythonOptimizer::Step(const py::list& param_groups, const py::object& closure,
                                 const py::object& base_step) {
  const Wait wait;
  Follow(param_groups);
  py::object result = py::none();
  LossKind kind = LossKind::kTensor;
  const auto base = [&](LossClosure wrapped) {
    const py::gil_scoped_acquire acquire;
    py::object shards = py::none();
    if (reducer_->has_sharded_state()) shards = sirtaki::python::ToPython(reducer_->shards());
    result = base_step(ToPython(std::move(wrapped), &kind), shards);
    return at::Tensor();
  };
  at::Tensor loss;
  {
    const py::gil_scoped_release release;
    loss = reducer_->Step(*this, Callable(closure, &kind), base);
  }
  return loss.defined() ? FromLoss(loss, kind) : result;
}

py::object PythonOptimizer::Shards(const py::list& param_groups) {
  if (!reducer_->is_sharded()) return py::none();
  Follow(param_groups);
  reducer_->CutParameters(*this);
  return sirtaki::python::ToPython(reducer_->shards());
}

void PythonOptimizer::Synchronize(const py::list& param_groups) {
  const Wait wait;
  Follow(param_groups);
  const py::gil_scoped_release release;
  reducer_->Synchronize(*this);
}

void PythonOptimizer::BeforeZeroGrad(const py::list& param_groups) {
  Follow(param_groups);
  const py::gil_scoped_release release;
  reducer_->BeforeZeroGrad(*this);
}

double PythonOptimizer::ClipGradNorm(const py::list& param_groups, double max_norm,
                                     double norm_type, bool error_if_nonfinite) {
  Follow(param_groups);
  const py::gil_scoped_release release;
  return clip_grad_norm_(*this, max_norm, norm_type, error_if_nonfinite);
}

at::Tensor PythonOptimizer::step(LossClosure /*closure*/) {
  throw std::logic_error("a Python optimizer makes its steps in Python");
}

ModuleReducer::ModuleReducer(ReducerSettings settings) {
  const py::gil_scoped_release release;
  reducer_ = std::make_unique<detail::GradientReducer>(std::move(settings.named), settings.options);
}

ModuleReducer::~ModuleReducer() {
  const py::gil_scoped_release release;
  reducer_.reset();
}

}  // namespace sirtaki::python
