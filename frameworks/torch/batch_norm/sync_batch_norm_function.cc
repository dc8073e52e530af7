#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <exception>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "frameworks/torch/batch_norm/sync_batch_norm_gpu.h"
#include "frameworks/torch/batch_norm/sync_batch_norm_impl.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Call = SyncBatchNormFunction::Call;
using MaybeTensor = std::optional<at::Tensor>;

// Several calls of a module may wait for their backward(), which the ranks may run in different
// orders: the names are as many, and no more, so that each keeps its agreed id.
constexpr std::int64_t kNames = 16;
// The squares of this many call numbers, summed over thousands of ranks, are exact in float64.
constexpr std::int64_t kNumbers = 4096;

constexpr char kCall[] = "call";

at::Tensor Dense(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.to(type).contiguous(tensor.suggest_memory_format());
}

MaybeTensor InType(const MaybeTensor& tensor, at::ScalarType type) {
  return tensor ? MaybeTensor(tensor->to(type)) : std::nullopt;
}

// (x - mean) / sqrt(variance + eps) * weight + bias, by the kernel that evaluates BatchNorm.
at::Tensor Normalize(const at::Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                     const SyncBatchNormCall& call) {
  const auto type = ComputingType(x.scalar_type());
  return std::get<0>(at::native_batch_norm(x, InType(weight, type), InType(bias, type),
                                           call.batch.mean.to(type), call.variance.to(type),
                                           /*training=*/false, /*momentum=*/0.0, call.eps));
}

struct Sums {
  at::Tensor gradient;  // dy / sqrt(variance + eps) * weight, as if mean and variance were fixed
  at::Tensor dy;        // float64 [C]; sum of dy
  at::Tensor dy_x;      // float64 [C]; sum of dy times normalized x
};

// This rank's. The kernel of BatchNorm's backward in evaluation gives all three.
Sums SumsOf(const at::Tensor& dy, const at::Tensor& x, const MaybeTensor& weight,
            const SyncBatchNormCall& call, bool with_gradient) {
  const auto zeros = at::zeros({x.size(1)}, at::kDouble);
  if (x.numel() == 0) return {at::zeros_like(x), zeros, zeros};
  const auto type = x.scalar_type();
  auto [gradient, dy_x, sum] = at::native_batch_norm_backward(
      dy, x, InType(weight, type), call.batch.mean.to(type), call.variance.to(type), {}, {},
      /*train=*/false, call.eps, {with_gradient, true, true});
  return {gradient, sum.to(at::kDouble), dy_x.to(at::kDouble)};
}

// Sums tensors over the ranks, in place. `of_number`: where this rank's call number goes, its square,
// and 1, in float64. `invalid`: why this rank has nothing.
void Reduce(std::vector<at::Tensor> tensors, const at::Tensor& of_number,
            const SyncBatchNormCall& call, std::string invalid) {
  const auto number = static_cast<double>(call.number % kNumbers);
  TensorCall reduction;
  reduction.kind = core::OpKind::kAllReduce;
  reduction.name = call.key + "/backward " + std::to_string(call.number % kNames);
  reduction.process_set = call.set.process_set;
  reduction.reduction = core::ReduceOp::kSum;
  reduction.in_place = true;
  reduction.will_wait = true;
  reduction.grouped = tensors.size() > 1;
  reduction.invalid = std::move(invalid);
  if (reduction.invalid.empty()) {
    auto* told = of_number.mutable_data_ptr<double>();
    told[0] = number;
    told[1] = number * number;
    told[2] = 1;
    reduction.tensor = tensors[0];
    reduction.group = std::move(tensors);
  }
  const std::string name = reduction.name;
  PendingTensor::Start(std::move(reduction), call.set.session)->Results();

  // The sum of squares is the square of the sum, divided by the number of ranks, only where all have the
  // same number. Those that had joined before forward() are not among them.
  const auto* numbers = of_number.const_data_ptr<double>();
  if (numbers[2] != call.ranks || numbers[1] * call.ranks != numbers[0] * numbers[0]) {
    ThrowStatus(core::Status(
        core::StatusCode::kMismatch,
        "\"" + name + "\": the ranks run backward() of different calls of this SyncBatchNorm; " +
            "run the backward() of its calls in the same order on all of them"));
  }
}

// The sums of all ranks, [2 C]. `invalid`: why this rank has none.
at::Tensor ReduceOnHost(const Sums& sums, const SyncBatchNormCall& call,
                        const std::string& invalid) {
  at::Tensor all;
  if (invalid.empty()) all = at::cat({sums.dy, sums.dy_x, at::zeros({3}, at::kDouble)});
  const std::int64_t values = invalid.empty() ? all.size(0) - 3 : 0;
  Reduce({all}, invalid.empty() ? all.narrow(0, values, 3) : at::Tensor(), call, invalid);
  return all.narrow(0, 0, values);
}

// Returns the gradients of weight, bias, and last of the input if it is needed.
variable_list GradientsOnHost(const at::Tensor& dy, const at::Tensor& input,
                              const MaybeTensor& weight, const SyncBatchNormCall& call,
                              bool with_gradient) {
  Sums sums;
  std::string error;
  at::Tensor x;
  try {
    const auto type = ComputingType(input.scalar_type());
    x = Dense(input, type);
    sums =
        SumsOf(dy.to(type).contiguous(x.suggest_memory_format()), x, weight, call, with_gradient);
  } catch (const std::exception& failure) {
    if (!call.reduces) throw;
    error = WhyNoMemory(failure);
  }
  const at::Tensor all = call.reduces ? ReduceOnHost(sums, call, error) : at::Tensor();
  variable_list results = {sums.dy_x, sums.dy};
  if (!with_gradient) return results;
  if (x.numel() > 0) {
    // Mean and variance depend on x: what follows from that, of all ranks' values.
    const std::int64_t channels = sums.dy.size(0);
    at::Tensor scale = -(call.variance + call.eps).rsqrt() / call.batch.count;
    if (weight) scale = scale * weight->to(at::kDouble);
    sums.gradient += Normalize(x, scale * all.narrow(0, channels, channels),
                               scale * all.narrow(0, 0, channels), call);
  }
  results.push_back(sums.gradient.to(input.scalar_type()));
  return results;
}

// Returns the gradients of weight and bias if there are any, and of the input. The call number
// travels beside the sums, on the host: the GPU is not asked.
variable_list GradientsOnGpu(const at::Tensor& dy, const at::Tensor& input,
                             const MaybeTensor& weight, const SyncBatchNormCall& call,
                             bool with_gradient) {
  GpuSums sums;
  std::string error;
  at::Tensor x;
  at::Tensor dense_dy;
  try {
    x = Dense(input, input.scalar_type());
    dense_dy = dy.contiguous(x.suggest_memory_format());
    sums = GpuSumsOf(dense_dy, x, weight, call);
  } catch (const std::exception& failure) {
    if (!call.reduces) throw;
    error = WhyNoMemory(failure);
  }
  if (call.reduces) {
    const at::Tensor numbers = at::zeros({3}, at::kDouble);
    Reduce({sums.of_dy, numbers}, numbers, call, error);
  }
  variable_list results;
  if (weight) results = {sums.weight_gradient, sums.bias_gradient};
  if (!with_gradient) return results;
  results.push_back(x.numel() == 0 ? at::zeros_like(x)
                                   : GpuInputGradient(dense_dy, x, weight, sums.of_dy, call));
  return results;
}

// What backward() computes, in a node of its own, so that differentiating it again is refused
// instead of being wrong.
struct Gradients : torch::autograd::Function<Gradients> {
  static variable_list forward(AutogradContext* context, const at::Tensor& dy,
                               const at::Tensor& input, const MaybeTensor& weight, const Call& call,
                               bool with_gradient) {
    context->saved_data[kCall] = at::IValue::make_capsule(call);
    return (input.is_cuda() ? GradientsOnGpu : GradientsOnHost)(dy, input, weight, *call,
                                                                with_gradient);
  }

  static variable_list backward(AutogradContext* context, const variable_list&) {
    const auto call = c10::static_intrusive_pointer_cast<SyncBatchNormCall>(
        context->saved_data[kCall].toCapsule());
    ThrowStatus(core::Status(core::StatusCode::kUnsupported,
                             "\"" + call->key +
                                 "\": SyncBatchNorm cannot be differentiated twice; use "
                                 "torch::nn::BatchNorm where gradients of gradients are needed"));
  }
};

}  // namespace

at::Tensor SyncBatchNormFunction::forward(AutogradContext* context, const at::Tensor& input,
                                          const MaybeTensor& weight, const MaybeTensor& bias,
                                          const Call& call) {
  context->save_for_backward({input, weight.value_or(at::Tensor())});
  context->saved_data[kCall] = at::IValue::make_capsule(call);
  context->saved_data["bias"] = bias.has_value();
  if (input.numel() == 0) return at::empty_like(input);
  if (input.is_cuda()) return NormalizeOnGpu(input, weight, bias, *call);
  return Normalize(input.contiguous(input.suggest_memory_format()), weight, bias, *call);
}

variable_list SyncBatchNormFunction::backward(AutogradContext* context,
                                              const variable_list& gradients) {
  const variable_list saved = context->get_saved_variables();
  const auto call =
      c10::static_intrusive_pointer_cast<SyncBatchNormCall>(context->saved_data[kCall].toCapsule());
  const MaybeTensor weight = saved[1].defined() ? MaybeTensor(saved[1]) : std::nullopt;
  const bool with_gradient = context->needs_input_grad(0);
  variable_list results = Gradients::apply(gradients[0], saved[0], weight, call, with_gradient);
  return {with_gradient ? results.back() : at::Tensor(), weight ? results[0] : at::Tensor(),
          context->saved_data["bias"].toBool() ? results[1] : at::Tensor(), at::Tensor()};
}

}  // namespace sirtaki::detail
