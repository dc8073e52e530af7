#include "frameworks/torch/state/fused_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <typeinfo>
#include <unordered_set>
#include <utility>
#include <vector>

#include "frameworks/torch/state/optimizer_device.h"
#include "frameworks/torch/tensors/tensor_bridge.h"

namespace sirtaki::detail {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

// An operator takes tensors of one type on one device, list by list.
struct StepLists {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> first;  // the momentum, the first moments, or the sums
  std::vector<at::Tensor> second;
  std::vector<at::Tensor> largest;
  std::vector<at::Tensor> steps;
};

// What the state has that is not like the parameter, which a file may have brought; empty if it all
// is.
std::string WhyNotLike(const at::Tensor& parameter, torch::optim::OptimizerParamState& state) {
  for (const at::Tensor* const tensor :
       TensorsOfState(state).value_or(std::vector<at::Tensor*>())) {
    if (tensor->defined() &&
        (tensor->sizes() != parameter.sizes() || tensor->device() != parameter.device() ||
         tensor->scalar_type() != parameter.scalar_type() || tensor->layout() != at::kStrided)) {
      return "has state of " + TypeAndShape(*tensor) +
             ", which has to be like it: load the state of this optimizer, or clear it";
    }
  }
  return {};
}

// The operators look at addresses and numbers of elements only.
void CheckTensors(Optimizer& optimizer, const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  std::string why;
  if (!at::isFloatingType(parameter.scalar_type())) {
    why = "has a type that the operators do not take: they take floating point";
  } else if (!parameter.is_non_overlapping_and_dense() || parameter.is_neg()) {
    why = "does not lie dense in memory: make it contiguous";
  } else if (!parameter.is_cpu() && !parameter.is_cuda()) {
    why = "is neither on the CPU nor on a CUDA device";
  } else if (gradient.layout() != at::kStrided) {
    why = "has a sparse gradient: make it dense by sparse_as_dense";
  } else if (gradient.scalar_type() != parameter.scalar_type() ||
             gradient.device() != parameter.device() || gradient.sizes() != parameter.sizes()) {
    why = "has a gradient of " + TypeAndShape(gradient) + ", which has to be like it";
  } else if (const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
             found != optimizer.state().end() && found->second) {
    why = WhyNotLike(parameter, *found->second);
  }
  if (why.empty()) return;
  throw std::invalid_argument("a fused step: a parameter of " + TypeAndShape(parameter) + " " +
                              why + ", or leave out the option fused");
}

// The elements of this tensor in the order in which the parameter's lie in memory.
at::Tensor OrderedLike(const at::Tensor& parameter, const at::Tensor& tensor) {
  if (tensor.strides() == parameter.strides() && !tensor.is_neg()) return tensor;
  return at::empty_strided(parameter.sizes(), parameter.strides(), tensor.options()).copy_(tensor);
}
at::Tensor StateLike(const at::Tensor& parameter, const at::Tensor& tensor) {
  return tensor.defined() ? OrderedLike(parameter, tensor) : at::zeros_like(parameter);
}

template <class State>
State& StateOf(Optimizer& optimizer, const at::Tensor& parameter) {
  auto& state = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (!state) state = std::make_unique<State>();
  return static_cast<State&>(*state);
}

// The number of a step as the operators want it; it is made once for each device.
class StepNumbers {
 public:
  at::Tensor At(std::int64_t step, const at::Tensor& parameter) {
    at::Tensor& number = numbers_[{step, parameter.device().str()}];
    if (!number.defined()) {
      number = at::full({}, step, at::TensorOptions(at::kFloat).device(parameter.device()));
    }
    return number;
  }

 private:
  std::map<std::pair<std::int64_t, std::string>, at::Tensor> numbers_;
};

// Calls take(parameter, options, &lists, &numbers) for each parameter of a group that has a gradient,
// and run(lists, options, bool) for the lists of each type and device; the bool is what take has
// returned.
template <class Options, class Take, class Run>
void StepGroups(Optimizer& optimizer, const Take& take, const Run& run) {
  const at::NoGradGuard no_grad;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) CheckTensors(optimizer, parameter);
    }
  }
  StepNumbers numbers;
  for (OptimizerParamGroup& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    std::map<std::tuple<at::ScalarType, std::string, bool>, StepLists> all;
    std::unordered_set<const void*> listed;
    const auto run_all = [&] {
      for (auto& [kind, lists] : all) {
        run(lists, options, std::get<bool>(kind));
        for (const at::Tensor& parameter : lists.parameters) NoteOverwritten(parameter);
      }
      all.clear();
      listed.clear();
    };
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined() || parameter.numel() == 0) continue;
      // A parameter that stands twice steps twice, the second time from where the first has led.
      if (listed.contains(parameter.unsafeGetTensorImpl())) run_all();
      listed.insert(parameter.unsafeGetTensorImpl());
      StepLists one;
      const bool is_first = take(parameter, options, &one, &numbers);
      StepLists& lists = all[{parameter.scalar_type(), parameter.device().str(), is_first}];
      lists.parameters.push_back(parameter);
      lists.gradients.push_back(OrderedLike(parameter, parameter.grad()));
      for (const auto member :
           {&StepLists::first, &StepLists::second, &StepLists::largest, &StepLists::steps}) {
        for (at::Tensor& tensor : one.*member) (lists.*member).push_back(std::move(tensor));
      }
    }
    run_all();
  }
}

template <class Options, class State, auto Operator>
void StepAdam(Optimizer& optimizer) {
  StepGroups<Options>(
      optimizer,
      [&](const at::Tensor& parameter, const Options& options, StepLists* one,
          StepNumbers* numbers) {
        State& state = StateOf<State>(optimizer, parameter);
        state.step(state.step() + 1);
        state.exp_avg(StateLike(parameter, state.exp_avg()));
        state.exp_avg_sq(StateLike(parameter, state.exp_avg_sq()));
        one->first.push_back(state.exp_avg());
        one->second.push_back(state.exp_avg_sq());
        if (options.amsgrad()) {
          state.max_exp_avg_sq(StateLike(parameter, state.max_exp_avg_sq()));
          one->largest.push_back(state.max_exp_avg_sq());
        }
        one->steps.push_back(numbers->At(state.step(), parameter));
        return false;
      },
      [](const StepLists& lists, const Options& options, bool /*is_first*/) {
        const auto [beta1, beta2] = options.betas();
        Operator(lists.parameters, lists.gradients, lists.first, lists.second, lists.largest,
                 lists.steps, options.lr(), beta1, beta2, options.weight_decay(), options.eps(),
                 options.amsgrad(), /*maximize=*/false, {}, {});
      });
}

// The operators have overloads for a tensor as lr.
constexpr void (*kFusedAdam)(at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                             at::TensorList, at::TensorList, double, double, double, double, double,
                             bool, bool, const std::optional<at::Tensor>&,
                             const std::optional<at::Tensor>&) = at::_fused_adam_;
constexpr decltype(kFusedAdam) kFusedAdamW = at::_fused_adamw_;

void StepAdagrad(Optimizer& optimizer) {
  using torch::optim::AdagradOptions;
  using torch::optim::AdagradParamState;
  StepGroups<AdagradOptions>(
      optimizer,
      [&](const at::Tensor& parameter, const AdagradOptions& options, StepLists* one,
          StepNumbers* numbers) {
        AdagradParamState& state = StateOf<AdagradParamState>(optimizer, parameter);
        state.step(state.step() + 1);
        const bool is_new = !state.sum().defined();
        state.sum(StateLike(parameter, state.sum()));
        if (is_new) state.sum().fill_(options.initial_accumulator_value());
        one->first.push_back(state.sum());
        one->steps.push_back(numbers->At(state.step(), parameter));
        return false;
      },
      [](const StepLists& lists, const AdagradOptions& options, bool /*is_first*/) {
        at::_fused_adagrad_(lists.parameters, lists.gradients, lists.first, lists.steps,
                            options.lr(), options.lr_decay(), options.weight_decay(), options.eps(),
                            /*maximize=*/false);
      });
}

// LibTorch's operator for SGD, up to 2.13 (pytorch/pytorch#191763), leaves elements of half types on
// the CPU as they are, but for those behind the last whole vector: there it gets wider copies of a
// parameter at a time.
void RunSgd(const StepLists& lists, const torch::optim::SGDOptions& options, bool is_first) {
  const auto run = [&](const StepLists& of) {
    at::_fused_sgd_(of.parameters, of.gradients, of.first, options.weight_decay(),
                    options.momentum(), options.lr(), options.dampening(), options.nesterov(),
                    /*maximize=*/false, is_first);
  };
  const at::Tensor& like = lists.parameters.front();
  if (!like.is_cpu() || !at::isReducedFloatingType(like.scalar_type())) return run(lists);
  for (std::size_t i = 0; i < lists.parameters.size(); ++i) {
    StepLists wide;
    wide.parameters.push_back(lists.parameters[i].to(at::kFloat));
    wide.gradients.push_back(lists.gradients[i].to(at::kFloat));
    if (!lists.first.empty()) wide.first.push_back(lists.first[i].to(at::kFloat));
    run(wide);
    lists.parameters[i].detach().copy_(wide.parameters.front());
    if (!lists.first.empty()) lists.first[i].copy_(wide.first.front());
  }
}

void StepSgd(Optimizer& optimizer) {
  using torch::optim::SGDOptions;
  using torch::optim::SGDParamState;
  StepGroups<SGDOptions>(
      optimizer,
      [&](const at::Tensor& parameter, const SGDOptions& options, StepLists* one,
          StepNumbers* /*numbers*/) {
        if (options.momentum() == 0) return false;
        SGDParamState& state = StateOf<SGDParamState>(optimizer, parameter);
        const bool is_first = !state.momentum_buffer().defined();
        state.momentum_buffer(StateLike(parameter, state.momentum_buffer()));
        one->first.push_back(state.momentum_buffer());
        return is_first;
      },
      RunSgd);
}

}  // namespace

FusedStep FusedStepOf(const std::type_info& type) {
  using namespace torch::optim;
  if (type == typeid(Adam)) return StepAdam<AdamOptions, AdamParamState, kFusedAdam>;
  if (type == typeid(AdamW)) return StepAdam<AdamWOptions, AdamWParamState, kFusedAdamW>;
  if (type == typeid(Adagrad)) return StepAdagrad;
  if (type == typeid(SGD)) return StepSgd;
  return nullptr;
}

std::string WhyNotFused(const std::type_info& type) {
  if (FusedStepOf(type) != nullptr) return {};
  return "LibTorch has fused operators for its Adagrad, Adam, AdamW and SGD only, and this "
         "optimizer is of another class: leave out the option fused";
}

}  // namespace sirtaki::detail
