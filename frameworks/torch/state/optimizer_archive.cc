#include "frameworks/torch/state/optimizer_archive.h"

#include <ATen/ops/empty.h>
#include <c10/util/Type.h>
#include <torch/optim/lbfgs.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <unordered_set>
#include <utility>
#include <vector>

#include "frameworks/torch/state/optimizer_device.h"
#include "frameworks/torch/tensors/tensor_bridge.h"

namespace sirtaki::detail {
namespace {

using torch::optim::Optimizer;

// LBFGS's `al` is scratch of step(), a list of history_size tensors that are undefined until the
// history is that long, and LibTorch (2.11) cannot save undefined tensors of a list. Without it
// step() makes a new one.
class WithoutScratch {
 public:
  explicit WithoutScratch(Optimizer& optimizer) {
    for (auto& [parameter, state] : optimizer.state()) {
      auto* lbfgs = dynamic_cast<torch::optim::LBFGSParamState*>(state.get());
      if (!lbfgs) continue;
      kept_.emplace_back(lbfgs, std::move(lbfgs->al()));
      lbfgs->al(std::nullopt);
    }
  }
  ~WithoutScratch() {
    for (auto& [state, scratch] : kept_) state->al(std::move(scratch));
  }
  WithoutScratch(const WithoutScratch&) = delete;
  WithoutScratch& operator=(const WithoutScratch&) = delete;

 private:
  std::vector<std::pair<torch::optim::LBFGSParamState*, std::optional<std::vector<torch::Tensor>>>>
      kept_;
};

// Where a parameter stands twice (tied weights), LibTorch (2.11) loads its state for the first
// place and overwrites that with null for the second. Meanwhile something else stands there.
class WithoutRepetitions {
 public:
  explicit WithoutRepetitions(Optimizer& optimizer) : optimizer_(optimizer) {
    std::unordered_set<const void*> seen;
    for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
      auto& parameters = optimizer.param_groups()[g].params();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (seen.insert(parameters[i].unsafeGetTensorImpl()).second) continue;
        repeated_.push_back({g, i, std::exchange(parameters[i], at::empty({0}))});
      }
    }
  }
  ~WithoutRepetitions() {
    for (Place& place : repeated_) {
      at::Tensor& parameter = optimizer_.param_groups()[place.group].params()[place.index];
      optimizer_.state().erase(parameter.unsafeGetTensorImpl());
      parameter = std::move(place.parameter);
    }
  }
  WithoutRepetitions(const WithoutRepetitions&) = delete;
  WithoutRepetitions& operator=(const WithoutRepetitions&) = delete;

 private:
  struct Place {
    std::size_t group;
    std::size_t index;
    at::Tensor parameter;
  };
  Optimizer& optimizer_;
  std::vector<Place> repeated_;
};

// Parameters that have state. What belongs to none in the groups is not counted: it is not saved in
// a way that could be loaded.
std::int64_t CountStates(const Optimizer& optimizer) {
  std::unordered_set<const void*> with_state;
  for (const at::Tensor& parameter : ParametersOf(optimizer)) {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found != optimizer.state().end() && found->second) with_state.insert(found->first);
  }
  return static_cast<std::int64_t>(with_state.size());
}

}  // namespace

std::string BytesOf(torch::serialize::OutputArchive& archive, std::size_t expected) {
  std::string bytes;
  bytes.reserve(expected);
  archive.save_to([&bytes](const void* from, std::size_t size) {
    bytes.append(static_cast<const char*>(from), size);
    return size;
  });
  return bytes;
}

std::vector<at::Tensor> ParametersOf(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  return parameters;
}

std::vector<at::Tensor> DistinctParametersOf(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters = ParametersOf(optimizer);
  std::unordered_set<const void*> seen;
  std::erase_if(parameters, [&seen](const at::Tensor& parameter) {
    return !seen.insert(parameter.unsafeGetTensorImpl()).second;
  });
  return parameters;
}

std::vector<std::string> DescribeOptimizer(const torch::optim::Optimizer& optimizer,
                                           const DescribeParameter& more) {
  std::vector<std::string> lines;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& group = optimizer.param_groups()[g];
    const torch::optim::OptimizerOptions& options = group.options();
    const std::string of_group = "group " + std::to_string(g);
    lines.push_back(of_group + " with " + c10::demangle(typeid(options).name()));
    for (std::size_t i = 0; i < group.params().size(); ++i) {
      lines.push_back("parameter " + std::to_string(i) + " of " + of_group + ", " +
                      TypeAndShape(group.params()[i]) + (more ? more(group.params()[i]) : ""));
    }
  }
  return lines;
}

void SaveOptimizer(Optimizer& optimizer, torch::serialize::OutputArchive& archive) {
  torch::serialize::OutputArchive own(archive.compilation_unit());
  {
    const WithoutScratch without_scratch(optimizer);
    optimizer.save(own);
  }
  archive.write("optimizer", own);
  archive.write("states", c10::IValue(CountStates(optimizer)));
}

void LoadOptimizer(Optimizer& optimizer, torch::serialize::InputArchive& archive) {
  torch::serialize::InputArchive own;
  archive.read("optimizer", own);
  c10::IValue states;
  archive.read("states", states);
  // load() adds to what is there.
  optimizer.state().clear();
  {
    const WithoutRepetitions without_repetitions(optimizer);
    optimizer.load(own);
  }
  PutStateOnDevices(optimizer);
  const std::int64_t loaded = CountStates(optimizer);
  if (loaded == states.toInt()) return;
  throw std::runtime_error(
      "the optimizer's load() restored the state of " + std::to_string(loaded) + " parameters of " +
      std::to_string(states.toInt()) + " that had one; override its save() and load()");
}

}  // namespace sirtaki::detail
