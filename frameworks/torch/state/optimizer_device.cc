#include "frameworks/torch/state/optimizer_device.h"

#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <vector>

#include "frameworks/torch/state/optimizer_archive.h"
#include "frameworks/torch/tensors/tensor_bridge.h"

namespace sirtaki::detail {
namespace {

using torch::optim::OptimizerParamState;
using Tensors = std::vector<at::Tensor*>;

// Null if the state is of another class, even of one derived from it.
template <class State>
State* As(OptimizerParamState& state) {
  return typeid(state) == typeid(State) ? static_cast<State*>(&state) : nullptr;
}

Tensors TensorsOf(torch::optim::LBFGSParamState& state) {
  Tensors tensors = {&state.d(), &state.H_diag(), &state.prev_flat_grad()};
  for (auto* list : {&state.old_dirs(), &state.old_stps(), &state.ro()}) {
    for (at::Tensor& tensor : *list) tensors.push_back(&tensor);
  }
  if (state.al()) {
    for (at::Tensor& tensor : *state.al()) tensors.push_back(&tensor);
  }
  return tensors;
}

// Through its own serialize(), since nobody else knows what it is made of.
void Reload(OptimizerParamState& state, c10::Device device) {
  try {
    torch::serialize::OutputArchive saved;
    state.serialize(saved);
    const std::string bytes = BytesOf(saved);
    torch::serialize::InputArchive archive;
    archive.load_from(bytes.data(), bytes.size(), device);
    state.serialize(archive);
  } catch (const std::exception& error) {
    throw std::runtime_error(c10::str("a state of class ", c10::demangle(typeid(state).name()),
                                      " cannot be moved to ", device,
                                      " by its serialize(): ", TextOf(error)));
  }
}

}  // namespace

std::optional<Tensors> TensorsOfState(OptimizerParamState& state) {
  using namespace torch::optim;
  if (auto* of = As<SGDParamState>(state)) return Tensors{&of->momentum_buffer()};
  if (auto* of = As<AdamParamState>(state)) {
    return Tensors{&of->exp_avg(), &of->exp_avg_sq(), &of->max_exp_avg_sq()};
  }
  if (auto* of = As<AdamWParamState>(state)) {
    return Tensors{&of->exp_avg(), &of->exp_avg_sq(), &of->max_exp_avg_sq()};
  }
  if (auto* of = As<AdagradParamState>(state)) return Tensors{&of->sum()};
  if (auto* of = As<RMSpropParamState>(state)) {
    return Tensors{&of->square_avg(), &of->momentum_buffer(), &of->grad_avg()};
  }
  if (auto* of = As<LBFGSParamState>(state)) return TensorsOf(*of);
  return std::nullopt;
}

std::unique_ptr<OptimizerParamState> CopyOfState(const OptimizerParamState& state) {
  std::unique_ptr<OptimizerParamState> copy = state.clone();
  for (at::Tensor* const tensor : TensorsOfState(*copy).value_or(Tensors())) {
    if (tensor->defined()) *tensor = tensor->clone();
  }
  return copy;
}

void PutStateOnDevices(torch::optim::Optimizer& optimizer) {
  for (const at::Tensor& parameter : ParametersOf(optimizer)) {
    if (parameter.device().is_cpu()) continue;
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end() || !found->second) continue;
    const auto tensors = TensorsOfState(*found->second);
    if (!tensors) Reload(*found->second, parameter.device());
    for (at::Tensor* const tensor : tensors.value_or(Tensors())) {
      if (tensor->defined()) *tensor = tensor->to(parameter.device());
    }
  }
}

}  // namespace sirtaki::detail
