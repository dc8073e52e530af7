#include "frameworks/torch/state/named_parameters.h"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/base/text.h"
#include "frameworks/torch/state/optimizer_archive.h"
#include "frameworks/torch/state/tensor_split.h"
#include "frameworks/torch/tensors/tensor_bridge.h"

namespace sirtaki::detail {

NamedTensors TensorsOf(const torch::nn::Module& module) {
  NamedTensors tensors;
  for (const auto& item : module.named_parameters()) tensors.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) {
    tensors.emplace_back("buffer " + item.key(), item.value());
  }
  return tensors;
}

NamedTensors NamesByPosition(const torch::optim::Optimizer& optimizer) {
  NamedTensors names;
  for (const at::Tensor& parameter : DistinctParametersOf(optimizer)) {
    names.emplace_back("parameter " + std::to_string(names.size()), parameter);
  }
  return names;
}

NamedParameters MatchNames(const torch::optim::Optimizer& optimizer,
                           const NamedTensors& named_tensors) {
  NamedParameters named;
  std::unordered_map<const void*, std::string> name_of;
  std::unordered_set<std::string> names;
  for (const auto& [name, tensor] : named_tensors) {
    if (!names.insert(name).second) {
      named.error = "the parameter name " + core::Quoted(name) + " is given twice";
      return named;
    }
    // The first counts of several names of one tensor (tied weights).
    if (tensor.defined()) name_of.emplace(tensor.unsafeGetTensorImpl(), name);
  }
  for (const at::Tensor& parameter : DistinctParametersOf(optimizer)) {
    const auto found = name_of.find(parameter.unsafeGetTensorImpl());
    if (found == name_of.end()) {
      named.error =
          "parameter " + std::to_string(named.names.size()) + " of the optimizer, " +
          TypeAndShape(parameter) +
          ", has no name in named_parameters: add it there, or leave named_parameters out";
      return named;
    }
    named.names.push_back(found->second);
    named.parameters.push_back(parameter);
  }
  return named;
}

void NameAdded(const torch::optim::Optimizer& optimizer, NamedTensors* names) {
  std::unordered_set<const void*> known;
  std::unordered_set<std::string> taken;
  for (const auto& [name, tensor] : *names) {
    known.insert(tensor.unsafeGetTensorImpl());
    taken.insert(name);
  }
  int number = 1;
  for (const at::Tensor& parameter : ParametersOf(optimizer)) {
    if (!known.insert(parameter.unsafeGetTensorImpl()).second) continue;
    std::string name;
    do {
      name = "added parameter " + std::to_string(number++);
    } while (taken.contains(name));
    names->emplace_back(std::move(name), parameter);
  }
}

std::vector<std::string> DescribeAll(const NamedParameters& named) {
  std::vector<std::string> list;
  for (std::size_t i = 0; i < named.names.size(); ++i) {
    list.push_back(core::Quoted(named.names[i]) + " " + TypeAndShape(named.parameters[i]) +
                   PlaceText(named.parameters[i]) +
                   (named.parameters[i].requires_grad() ? "" : ", frozen"));
  }
  return list;
}

}  // namespace sirtaki::detail
