#include "frameworks/torch/calls/differentiable.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/work.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

using core::OpKind;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr char kCall[] = "call";

// One forward(), as its backward() needs it.
struct Recorded : torch::CustomClassHolder {
  std::shared_ptr<SessionState> session;
  TensorCall call;  // without its tensors
  std::string gradient_name;
  std::int64_t members = 0;
  bool is_root = false;
  struct Input {
    std::vector<std::int64_t> sizes;
    at::TensorOptions options;
    bool differentiable = false;
    std::vector<std::int64_t> received;  // rows of the result from each member
  };
  std::vector<Input> inputs;
};

bool HasGradients(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex());
}

CallResults Run(TensorCall&& call, const std::shared_ptr<SessionState>& session,
                std::uint64_t* number) {
  const bool has_rows = core::FirstDimensionVaries(call.kind);
  const auto pending = PendingTensor::Start(std::move(call), session);
  *number = pending->call_number();
  CallResults results = {pending->Results(), {}};
  results.rows =
      has_rows ? pending->ReceivedRows() : decltype(results.rows)(results.tensors.size());
  return results;
}

[[noreturn]] void RefuseGradient(const Recorded& recorded) {
  const TensorCall& call = recorded.call;
  ThrowStatus(core::Status(core::StatusCode::kUnsupported,
                           DescribeCall(call.kind, call.name) + ": a gradient through " +
                               std::string(core::ReduceOpName(call.reduction)) +
                               " is not defined here; only sum and average have one"));
}

// The gradient of a sum is multiplied by this factor behind the call of the backward.
double FactorOf(const Recorded& recorded) {
  const TensorCall& call = recorded.call;
  const double factor = call.prescale * call.postscale;
  return call.reduction == core::ReduceOp::kAverage ? factor / static_cast<double>(recorded.members)
                                                    : factor;
}

// The call whose results, by GradientOf and FactorOf, are the gradients of the inputs.
TensorCall BackwardCall(const Recorded& recorded) {
  const TensorCall& forward = recorded.call;
  if (core::Reduces(forward.kind) && forward.reduction != core::ReduceOp::kSum &&
      forward.reduction != core::ReduceOp::kAverage) {
    RefuseGradient(recorded);
  }
  TensorCall call;
  call.name = recorded.gradient_name;
  call.derived_name = true;
  call.process_set = forward.process_set;
  call.timeout = forward.timeout;
  call.grouped = forward.grouped;
  call.root = forward.root;
  switch (forward.kind) {
    case OpKind::kAllReduce:
      call.kind = OpKind::kAllReduce;
      call.reduction = forward.reduction;
      call.prescale = forward.prescale;
      call.postscale = forward.postscale;
      call.wire = forward.wire;
      call.root = -1;
      break;
    case OpKind::kBroadcast:
      call.kind = OpKind::kReduce;
      break;
    case OpKind::kReduce:
      call.kind = OpKind::kBroadcast;
      break;
    case OpKind::kAllGatherInto:
      call.kind = OpKind::kReduceScatter;
      break;
    case OpKind::kReduceScatter:
      call.kind = OpKind::kAllGather;  // the last ranks may have a row less
      break;
    case OpKind::kGather:
      call.kind = OpKind::kScatter;
      break;
    case OpKind::kScatter:
      call.kind = OpKind::kGather;
      break;
    case OpKind::kAllGather:
    case OpKind::kAllToAll:
      call.kind = OpKind::kAllToAll;
      break;
    default:
      RefuseGradient(recorded);
  }
  return call;
}

bool SendsBackRows(OpKind kind) {
  return kind == OpKind::kAllGather || kind == OpKind::kAllToAll || kind == OpKind::kGather;
}

// A member that has joined sends no gradient of the rows that it got: none of its losses has them, so
// zeros take their places. `sent`: the rows of `arrived` from each member.
at::Tensor WithRowsOfJoined(const Recorded& recorded, std::size_t index, const at::Tensor& arrived,
                            const std::vector<std::int64_t>& sent) {
  std::vector<std::int64_t> sizes = recorded.inputs[index].sizes;
  if (sizes.empty() || arrived.size(0) == sizes[0]) return arrived;
  const auto& splits = recorded.call.SplitsOf(index);
  const std::int64_t rows = sizes[0];
  std::int64_t begin = 0;
  std::vector<at::Tensor> parts;
  for (std::size_t member = 0; member < sent.size(); ++member) {
    sizes[0] = splits.empty()
                   ? core::RowsOf(rows, recorded.members, static_cast<std::int64_t>(member))
                   : splits[member];
    parts.push_back(sent[member] == sizes[0] ? arrived.narrow(0, begin, sizes[0])
                                             : at::zeros(sizes, arrived.options()));
    begin += sent[member];
  }
  return at::cat(parts);
}

// The gradient of one input from what the backward's call brought for it.
at::Tensor GradientOf(const Recorded& recorded, std::size_t index, const at::Tensor& arrived,
                      const std::vector<std::int64_t>& sent) {
  const Recorded::Input& input = recorded.inputs[index];
  switch (recorded.call.kind) {
    case OpKind::kAllGather: {
      // Everybody's gradient of this rank's rows, one after the other; nobody's who has joined.
      std::vector<std::int64_t> sizes = input.sizes;
      const std::int64_t own = c10::multiply_integers(sizes);
      sizes.insert(sizes.begin(), own == 0 ? recorded.members : arrived.numel() / own);
      return arrived.view(sizes).sum(0);
    }
    case OpKind::kBroadcast:
      return recorded.is_root ? arrived : at::zeros(input.sizes, input.options);
    case OpKind::kScatter:
      return recorded.is_root ? WithRowsOfJoined(recorded, index, arrived, sent)
                              : at::zeros(input.sizes, input.options);
    case OpKind::kAllToAll:
      return WithRowsOfJoined(recorded, index, arrived, sent);
    case OpKind::kReduce:
    case OpKind::kReduceScatter: {
      const at::Tensor whole = WithRowsOfJoined(recorded, index, arrived, sent);
      const double factor = FactorOf(recorded);
      return factor == 1.0 ? whole : whole * factor;
    }
    default:
      return arrived;
  }
}

struct CollectiveFunction : torch::autograd::Function<CollectiveFunction> {
  static variable_list forward(AutogradContext* context, at::TensorList tensors,
                               const c10::intrusive_ptr<Recorded>& recorded, CallResults* results) {
    TensorCall call = recorded->call;
    if (call.grouped) {
      call.group = tensors.vec();
    } else {
      call.tensor = tensors.front();
    }
    std::uint64_t number = 0;
    *results = Run(TensorCall(call), recorded->session, &number);
    recorded->gradient_name = call.name.empty()
                                  ? "#the gradient of unnamed call #" + std::to_string(number)
                                  : call.name + ".grad";
    variable_list constant;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = tensors[i];
      recorded->inputs.push_back(
          {tensor.sizes().vec(), tensor.options(), HasGradients(tensor), results->rows[i]});
      if (!HasGradients(tensor)) constant.push_back(results->tensors[i]);
    }
    context->mark_non_differentiable(constant);
    context->saved_data[kCall] = at::IValue::make_capsule(recorded);
    return results->tensors;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto recorded =
        c10::static_intrusive_pointer_cast<Recorded>(context->saved_data[kCall].toCapsule());
    TensorCall call = BackwardCall(*recorded);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const Recorded::Input& input = recorded->inputs[i];
      if (!input.differentiable) continue;
      call.group.push_back(gradients[i]);
      if (SendsBackRows(recorded->call.kind)) call.splits.push_back(input.received);
    }
    if (!call.grouped) call.tensor = std::exchange(call.group, {}).front();
    const CallResults arrived = RunDifferentiable(std::move(call), recorded->session);

    variable_list results;
    std::size_t next = 0;
    // The ranks that are not the root of a reduce have got their own tensor.
    const bool keeps_own = recorded->call.kind == OpKind::kReduce && !recorded->is_root;
    for (std::size_t i = 0; i < recorded->inputs.size(); ++i) {
      const Recorded::Input& input = recorded->inputs[i];
      results.emplace_back();
      if (!input.differentiable) continue;
      results.back() = GradientOf(*recorded, i, arrived.tensors[next], arrived.rows[next]);
      ++next;
      if (keeps_own) results.back() = results.back() + gradients[i];
    }
    results.resize(results.size() + 2);  // for what is no tensor
    return results;
  }
};

// The tensors that the call is made of.
std::vector<at::Tensor> TakeTensors(TensorCall* call) {
  if (call->grouped) return std::exchange(call->group, {});
  return {std::exchange(call->tensor, at::Tensor())};
}

bool NeedsGraph(const TensorCall& call) {
  if (!at::GradMode::is_enabled()) return false;
  for (std::size_t i = 0; i < call.count(); ++i) {
    if (call.at(i).defined() && call.at(i).requires_grad()) return true;
  }
  return false;
}

}  // namespace

CallResults RunDifferentiable(TensorCall call, const std::shared_ptr<SessionState>& session) {
  call.will_wait = true;
  std::uint64_t number = 0;
  if (!NeedsGraph(call)) return Run(std::move(call), session, &number);
  const CallMembers members = MembersOf(call.process_set, session);
  auto recorded = c10::make_intrusive<Recorded>();
  recorded->session = session;
  recorded->members = members.size();
  recorded->is_root = call.root == members.rank;
  const std::vector<at::Tensor> tensors = TakeTensors(&call);
  recorded->call = std::move(call);
  CallResults results;
  results.tensors = CollectiveFunction::apply(at::TensorList(tensors), recorded, &results);
  return results;
}

}  // namespace sirtaki::detail
