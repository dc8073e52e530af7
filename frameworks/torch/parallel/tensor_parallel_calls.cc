#include "frameworks/torch/parallel/tensor_parallel_calls.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr char kLayer[] = "layer";

struct HeldLayer : torch::CustomClassHolder {
  explicit HeldLayer(ParallelCallsPtr of) : calls(std::move(of)) {}
  const ParallelCallsPtr calls;
};

void HoldLayer(AutogradContext* context, const ParallelCallsPtr& calls) {
  context->saved_data[kLayer] = at::IValue::make_capsule(c10::make_intrusive<HeldLayer>(calls));
}

ParallelCallsPtr LayerHeldBy(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<HeldLayer>(context->saved_data[kLayer].toCapsule())
      ->calls;
}

// All columns of the last dimension, from the part of each rank.
at::Tensor GatherColumns(const at::Tensor& part, const ParallelCalls& calls) {
  const parallel::Split& split = calls.split().split;
  std::vector<std::int64_t> sizes = part.sizes().vec();
  const std::int64_t mine = sizes.back();
  // The first rank's part is the widest, and parts of one width travel as rows: a rank with other
  // rows is refused then.
  const std::int64_t widest = parallel::PartSize(split, 0);
  const std::int64_t rows = part.numel() / mine;
  at::Tensor own = part.detach().reshape({1, rows, mine});
  if (mine < widest) own = at::constant_pad_nd(own, {0, widest - mine});
  const at::Tensor all = AllGatherBlocking(own.contiguous(), calls.key + "/gather", calls.set);
  const at::Tensor whole = at::empty({rows, split.size}, part.options());
  for (int index = 0; index < split.ranks; ++index) {
    std::int64_t at = 0;
    for (const auto& [begin, count] : parallel::RangesOf(split, index)) {
      whole.narrow(1, begin, count).copy_(all[index].narrow(1, at, count));
      at += count;
    }
  }
  sizes.back() = split.size;
  return whole.view(sizes);
}

at::Tensor OwnColumns(const at::Tensor& whole, const ParallelCalls& calls) {
  TensorSplit along = calls.split();
  if (whole.dim() == 0 || whole.size(-1) != along.split.size) {
    ThrowInvalid("the input is " + TypeAndShape(whole) + "; its last dimension must have all " +
                 std::to_string(along.split.size) + " features");
  }
  along.dim = whole.dim() - 1;
  return TakePart(whole, along, along.index());
}

at::Tensor PassThrough(Region region, const at::Tensor& tensor, const ParallelCalls& calls) {
  switch (region) {
    case Region::kEnter:
      return tensor;
    case Region::kSum:
      return StartSum(calls, "sum", {tensor.detach().clone(), {}}, /*will_wait=*/true)
          ->Synchronize();
    case Region::kGather:
      return GatherColumns(tensor, calls);
    case Region::kScatter:
      return OwnColumns(tensor, calls);
  }
  return {};
}

Region GradientOf(Region region) {
  switch (region) {
    case Region::kEnter:
      return Region::kSum;
    case Region::kSum:
      return Region::kEnter;
    case Region::kGather:
      return Region::kScatter;
    case Region::kScatter:
      return Region::kGather;
  }
  return region;
}

struct RegionFunction : torch::autograd::Function<RegionFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, Region region,
                            const ParallelCallsPtr& calls, bool own) {
    HoldLayer(context, calls);
    context->saved_data["region"] = static_cast<std::int64_t>(region);
    if (!own) return PassThrough(region, tensor, *calls);
    // The tensor is in nobody's hands, and autograd does not need it: it may be overwritten.
    return StartSum(*calls, "sum", {tensor.variable_data(), {}}, /*will_wait=*/true)->Synchronize();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto region = static_cast<Region>(context->saved_data["region"].toInt());
    return {Through(GradientOf(region), gradients[0], LayerHeldBy(context)), at::Tensor(),
            at::Tensor(), at::Tensor()};
  }
};

at::Tensor RowsOf(const at::Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }

// The gradients of weight and bias, as far as they are needed.
void AddOwnGradients(AutogradContext* context, const at::Tensor& gradient, const at::Tensor& input,
                     variable_list* results) {
  const bool of_weight = context->needs_input_grad(1);
  const bool of_bias = context->saved_data["bias"].toBool() && context->needs_input_grad(2);
  if (!of_weight && !of_bias) return;
  const at::Tensor rows = RowsOf(gradient);
  if (of_weight) (*results)[1] = rows.t().matmul(RowsOf(input).conj());
  if (of_bias) (*results)[2] = rows.sum(0);
}

struct ColumnFunction : torch::autograd::Function<ColumnFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const ParallelCallsPtr& calls) {
    HoldLayer(context, calls);
    context->save_for_backward({input, weight});
    context->saved_data["bias"] = bias.has_value();
    return at::linear(input, weight, bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const ParallelCallsPtr calls = LayerHeldBy(context);
    const at::Tensor& gradient = gradients[0];
    variable_list results(4);
    if (at::GradMode::is_enabled()) {
      if (context->needs_input_grad(0)) {
        results[0] = Through(Region::kSum, gradient.matmul(saved[1].conj()), calls);
      }
      // Each rank's gradient of its weight depends on the input: what flows back from there is summed.
      AddOwnGradients(context, gradient, Through(Region::kEnter, saved[0], calls), &results);
      return results;
    }
    // The sum is under way while the gradient of the weight is computed.
    std::shared_ptr<PendingTensor> sum;
    if (context->needs_input_grad(0)) {
      sum =
          StartSum(*calls, "input gradient", Make([&] { return gradient.matmul(saved[1].conj()); }),
                   /*will_wait=*/false);
    }
    AddOwnGradients(context, gradient, saved[0], &results);
    if (sum) results[0] = sum->Synchronize();
    return results;
  }
};

}  // namespace

Made Make(const std::function<at::Tensor()>& make) {
  try {
    return {make(), {}};
  } catch (const c10::Error& error) {
    return {{}, TextOf(error)};
  } catch (const Error& error) {
    return {{}, TextOf(error)};
  } catch (const std::bad_alloc& error) {
    return {{}, WhyNoMemory(error)};
  }
}

std::shared_ptr<PendingTensor> StartSum(const ParallelCalls& calls, const std::string& part,
                                        const Made& made, bool will_wait) {
  TensorCall call =
      OwnCall(core::OpKind::kAllReduce, made.tensor, calls.key + "/" + part, calls.set);
  call.in_place = true;
  call.will_wait = will_wait;
  call.invalid = made.invalid;
  return PendingTensor::Start(std::move(call), calls.set.session);
}

at::Tensor GatherMade(const ParallelCalls& calls, const std::string& part, const Made& made) {
  TensorCall call =
      OwnCall(core::OpKind::kAllGather, made.tensor, calls.key + "/" + part, calls.set);
  call.invalid = made.invalid;
  return PendingTensor::Start(std::move(call), calls.set.session)->Synchronize();
}

at::Tensor Through(Region region, const at::Tensor& tensor, const ParallelCallsPtr& calls) {
  if (calls->ranks() == 1) return tensor;
  if (!at::GradMode::is_enabled() || !tensor.requires_grad())
    return PassThrough(region, tensor, *calls);
  return RegionFunction::apply(tensor, region, calls, /*own=*/false);
}

at::Tensor SumOwn(const Made& made, const ParallelCallsPtr& calls) {
  if (at::GradMode::is_enabled() && made.tensor.defined() && made.tensor.requires_grad()) {
    return RegionFunction::apply(made.tensor, Region::kSum, calls, /*own=*/true);
  }
  return StartSum(*calls, "sum", made, /*will_wait=*/true)->Synchronize();
}

at::Tensor GatherOwn(const Made& made, const ParallelCallsPtr& calls) {
  if (made.tensor.defined()) return Through(Region::kGather, made.tensor, calls);
  return GatherMade(*calls, "gather", made);
}

at::Tensor ColumnLinear(const at::Tensor& input, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias, const ParallelCallsPtr& calls) {
  if (calls->ranks() == 1 || !at::GradMode::is_enabled()) return at::linear(input, weight, bias);
  return ColumnFunction::apply(input, weight, bias, calls);
}

}  // namespace sirtaki::detail
