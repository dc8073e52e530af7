#include "frameworks/torch/gradients/optimizer_shards.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <typeinfo>
#include <unordered_set>
#include <utility>

#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/gradients/gradient_memory.h"
#include "frameworks/torch/state/optimizer_device.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

using torch::optim::Optimizer;

// The elements of a dense tensor in the order in which the parameter's lie in memory.
at::Tensor FlatLike(const at::Tensor& parameter, at::Tensor tensor) {
  tensor = tensor.detach();
  if (!LiesWith(tensor, parameter.strides())) {
    tensor =
        at::empty_strided(parameter.sizes(), parameter.strides(), tensor.options()).copy_(tensor);
  }
  return tensor.as_strided({tensor.numel()}, {1});
}

void CheckParameter(const at::Tensor& parameter) {
  std::string why;
  if (!parameter.is_non_overlapping_and_dense() || parameter.is_conj() || parameter.is_neg()) {
    why = "does not lie dense in memory: make it contiguous before the optimizer is made";
  } else if (parameter.grad().defined() && parameter.grad().layout() != at::kStrided) {
    why =
        "has a sparse gradient, which has no shards: leave out the option shard, or make it dense "
        "by "
        "sparse_as_dense";
  }
  if (why.empty()) return;
  throw std::invalid_argument("a parameter of " + TypeAndShape(parameter) + " " + why);
}

// What marks the state of an optimizer as that of shards. It goes where the state goes.
struct Mark : torch::optim::OptimizerCloneableParamState<Mark> {};

// The optimizer's parameters are its shards until this ends.
class InPlaceOfParameters {
 public:
  InPlaceOfParameters(Optimizer& optimizer, std::vector<std::vector<at::Tensor>> shards)
      : optimizer_(optimizer), others_(std::move(shards)) {
    Swap();
  }
  ~InPlaceOfParameters() { Swap(); }
  InPlaceOfParameters(const InPlaceOfParameters&) = delete;
  InPlaceOfParameters& operator=(const InPlaceOfParameters&) = delete;

 private:
  void Swap() {
    for (std::size_t g = 0; g < others_.size(); ++g) {
      optimizer_.param_groups()[g].params().swap(others_[g]);
    }
  }

  Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> others_;
};

}  // namespace

ShardBy ChooseShardBy(const Optimizer& optimizer) {
  using namespace torch::optim;
  const std::type_info& type = typeid(optimizer);
  const bool by_element = type == typeid(Adagrad) || type == typeid(Adam) ||
                          type == typeid(AdamW) || type == typeid(RMSprop) || type == typeid(SGD);
  return by_element ? ShardBy::Element : ShardBy::Parameter;
}

std::string WhyNotSharded(const Optimizer& optimizer) {
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr) return {};
  return "LBFGS looks at all parameters at once, so its state cannot be sharded: leave out the "
         "option shard";
}

std::vector<std::int64_t> CutShards(std::int64_t elements, std::int64_t element_bytes, int ranks,
                                    int least, ShardBy by) {
  const std::int64_t unit = std::max<std::int64_t>(1, 128 / element_bytes);
  const bool whole = by == ShardBy::Parameter || elements < unit * ranks;
  std::vector<std::int64_t> cuts;
  for (int rank = 0; rank < ranks; ++rank) {
    cuts.push_back(whole ? (rank > least ? elements : 0) : elements / ranks * rank / unit * unit);
  }
  cuts.push_back(elements);
  return cuts;
}

OptimizerShards::OptimizerShards(SessionSet set, std::string what, ShardBy by)
    : set_(std::move(set)),
      what_(std::move(what)),
      by_(by),
      elements_(static_cast<std::size_t>(set_.size())) {}

OptimizerShards::Shards& OptimizerShards::ShardsOf(const at::Tensor& parameter) {
  Shards& shards = shards_[parameter.unsafeGetTensorImpl()];
  const auto self = static_cast<std::size_t>(set_.members.index());
  if (shards.cuts.empty()) {
    const auto least = std::min_element(elements_.begin(), elements_.end());
    shards.parameter = parameter;
    shards.cuts = CutShards(parameter.numel(), static_cast<std::int64_t>(parameter.element_size()),
                            set_.size(), static_cast<int>(least - elements_.begin()), by_);
    for (std::size_t i = 0; i < elements_.size(); ++i) {
      elements_[i] += shards.cuts[i + 1] - shards.cuts[i];
    }
  }
  const std::int64_t count = shards.cuts[self + 1] - shards.cuts[self];
  if (count == 0) return shards;
  if (count == parameter.numel()) {
    shards.mine = parameter;
    return shards;
  }
  at::Tensor mine = FlatLike(parameter, parameter).narrow(0, shards.cuts[self], count);
  if (!shards.mine.defined()) {
    shards.mine = std::move(mine);
  } else if (!shards.mine.is_alias_of(mine) || shards.mine.data_ptr() != mine.data_ptr()) {
    shards.mine.set_data(mine);  // the parameter has got other memory; state belongs to the tensor
  }
  return shards;
}

// Cuts the state of the whole parameter, and lets it go.
void OptimizerShards::TakeState(Optimizer& optimizer, const Shards& shards) const {
  const auto found = optimizer.state().find(shards.parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end() || shards.mine.is_same(shards.parameter)) return;
  std::unique_ptr<torch::optim::OptimizerParamState> state = std::move(found->second);
  optimizer.state().erase(found);
  if (!shards.mine.defined() || !state) return;
  const auto tensors = TensorsOfState(*state);
  if (!tensors) {
    throw std::runtime_error(
        "the optimizer has state of a class that is not LibTorch's, which nobody can cut: shard by "
        "ShardBy::Parameter");
  }
  const std::int64_t begin = shards.cuts[static_cast<std::size_t>(set_.members.index())];
  for (at::Tensor* const tensor : *tensors) {
    if (!tensor->defined() || tensor->sizes() != shards.parameter.sizes()) continue;
    *tensor = FlatLike(shards.parameter, *tensor).narrow(0, begin, shards.mine.numel()).clone();
  }
  optimizer.state()[shards.mine.unsafeGetTensorImpl()] = std::move(state);
}

// Lets go what belongs to parameters that the optimizer has no more.
void OptimizerShards::Forget(Optimizer& optimizer) {
  std::unordered_set<const void*> present;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      present.insert(parameter.unsafeGetTensorImpl());
    }
  }
  std::erase_if(shards_, [&](const auto& entry) {
    const Shards& shards = entry.second;
    if (present.count(entry.first) != 0) return false;
    for (std::size_t i = 0; i < elements_.size(); ++i) {
      elements_[i] -= shards.cuts[i + 1] - shards.cuts[i];
    }
    if (shards.mine.defined()) optimizer.state().erase(shards.mine.unsafeGetTensorImpl());
    return true;
  });
}

void OptimizerShards::Step(Optimizer& optimizer, const std::function<void()>& base_step) {
  const at::NoGradGuard no_grad;
  Forget(optimizer);
  std::vector<Shards*> stepped;
  std::unordered_set<const void*> seen;
  std::exception_ptr first_error;
  std::string error;
  try {
    std::vector<std::vector<at::Tensor>> groups;
    for (const auto& group : optimizer.param_groups()) {
      std::vector<at::Tensor>& of_group = groups.emplace_back();
      for (const at::Tensor& parameter : group.params()) {
        const at::Tensor& gradient = parameter.grad();
        CheckParameter(parameter);
        const bool is_new = seen.insert(parameter.unsafeGetTensorImpl()).second;
        Shards& shards = ShardsOf(parameter);
        if (is_new && gradient.defined()) stepped.push_back(&shards);
        TakeState(optimizer, shards);
        if (!shards.mine.defined()) continue;
        of_group.push_back(shards.mine);
        if (shards.mine.is_same(parameter)) continue;
        const auto self = static_cast<std::size_t>(set_.members.index());
        shards.mine.mutable_grad() =
            gradient.defined()
                ? FlatLike(parameter, gradient).narrow(0, shards.cuts[self], shards.mine.numel())
                : at::Tensor();
      }
    }
    optimizer.state()[this] = std::make_unique<Mark>();
    const InPlaceOfParameters in_place(optimizer, std::move(groups));
    base_step();
  } catch (...) {
    first_error = std::current_exception();
    error = TextOfCurrent();
  }
  for (auto& [parameter, shards] : shards_) {
    if (shards.mine.defined() && !shards.mine.is_same(shards.parameter)) {
      shards.mine.mutable_grad().reset();
    }
  }
  if (stepped.empty() && first_error) std::rethrow_exception(first_error);
  try {
    Gather(stepped, error);
  } catch (...) {
    if (!first_error) throw;
  }
  if (first_error) std::rethrow_exception(first_error);
}

bool OptimizerShards::HaveCut(const Optimizer& optimizer) const {
  return optimizer.state().count(const_cast<OptimizerShards*>(this)) != 0;
}

void OptimizerShards::Gather(const std::vector<Shards*>& stepped, const std::string& error) const {
  if (stepped.empty()) return;
  TensorCall call;
  call.kind = core::OpKind::kAllGather;
  call.grouped = true;
  if (!error.empty()) call.invalid = "the step of the optimizer has thrown: " + error;
  for (const Shards* const shards : stepped) {
    const at::Tensor whole = FlatLike(shards->parameter, shards->parameter);
    const std::int64_t begin = shards->cuts[static_cast<std::size_t>(set_.members.index())];
    const std::int64_t count = shards->mine.defined() ? shards->mine.numel() : 0;
    call.group.push_back(whole.narrow(0, begin, count));
    call.into.push_back(whole);
  }
  call.name = "#the shards of the " + what_;
  call.derived_name = true;
  call.process_set = set_.process_set;
  call.will_wait = true;
  PendingTensor::Start(std::move(call), set_.session)->Results();
  for (const Shards* const shards : stepped) NoteOverwritten(shards->parameter);
}

}  // namespace sirtaki::detail
