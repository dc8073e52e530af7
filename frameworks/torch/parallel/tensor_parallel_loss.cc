#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <utility>
#include <vector>

#include "frameworks/torch/parallel/tensor_parallel_calls.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// OwnTargets are the targets as this rank's part of the classes sees them.
struct OwnTargets {
  at::Tensor columns;  // [rows]; 0 where the target is elsewhere
  at::Tensor absent;   // bool [rows]; the target is elsewhere, or is ignored
};

OwnTargets OwnTargetsOf(const at::Tensor& target, const ParallelCalls& calls) {
  const auto [begin, count] = parallel::RangesOf(calls.split().split, calls.index()).front();
  const at::Tensor absent = (target < begin).logical_or_(target >= begin + count);
  return {(target - begin).masked_fill_(absent, 0), absent};
}

at::Tensor AsColumn(const at::Tensor& column) { return column.unsqueeze(1); }

std::string WhyRefusedTargets(const at::Tensor& logits, const at::Tensor& target,
                              std::int64_t ignore_index, const ParallelCalls& calls) {
  const std::int64_t part = calls.part_size();
  if (!logits.is_floating_point() || logits.dim() != 2 || logits.size(1) != part) {
    return "the logits are " + TypeAndShape(logits) + "; their last dimension must have the " +
           std::to_string(part) + " classes of this rank, of " +
           std::to_string(calls.split().split.size) + " on " + std::to_string(calls.ranks()) +
           " ranks";
  }
  if (target.scalar_type() != at::kLong || target.numel() != logits.size(0)) {
    return "the targets are " + TypeAndShape(target) + "; they must be int64, one for each of " +
           std::to_string(logits.size(0)) + " rows of logits";
  }
  if (!target.is_cpu()) return {};  // a GPU is not waited for
  const at::Tensor wrong = (target < 0)
                               .logical_or_(target >= calls.split().split.size)
                               .logical_and_(target != ignore_index);
  if (!wrong.any().item<bool>()) return {};
  return "target " + std::to_string(target.masked_select(wrong)[0].item<std::int64_t>()) +
         " is none of the " + std::to_string(calls.split().split.size) + " classes";
}

// What a rank knows of its classes: the largest logit, the sum of exponentials over it, the target's
// logit if that is here, and for smoothing the sum of logits; [1, 3 or 4, rows]. `exponentials`: of
// each logit over the largest.
at::Tensor TellOf(const at::Tensor& logits, const OwnTargets& own, bool smooth,
                  at::Tensor* exponentials) {
  // Logits that are all -infinity have a largest one as well.
  const at::Tensor most = logits.amax(1).clamp_min_(logits.scalar_type() == at::kDouble
                                                        ? std::numeric_limits<double>::lowest()
                                                        : std::numeric_limits<float>::lowest());
  *exponentials = (logits - AsColumn(most)).exp_();
  std::vector<at::Tensor> told = {
      most, exponentials->sum(1),
      logits.gather(1, AsColumn(own.columns)).squeeze(1).masked_fill_(own.absent, 0)};
  if (smooth) told.push_back(logits.sum(1));
  return at::stack(told).unsqueeze(0);
}

// What backward() computes, in a node of its own, so that differentiating it again is refused
// instead of being wrong. `again` requires a gradient if that may come, so that the node is there.
struct LossGradient : torch::autograd::Function<LossGradient> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gradient,
                            const at::Tensor& probabilities, const at::Tensor& columns,
                            const at::Tensor& absent, const at::Tensor& again, double smoothing,
                            double classes, at::ScalarType type) {
    (void)context, (void)again;
    const at::Tensor scale = gradient.to(probabilities.scalar_type());
    at::Tensor result = probabilities * AsColumn(scale);
    if (smoothing != 0) result.sub_(AsColumn(scale * (smoothing / classes)));
    const at::Tensor at_target = (scale * (smoothing - 1)).masked_fill_(absent, 0);
    return result.scatter_add_(1, AsColumn(columns), AsColumn(at_target)).to(type);
  }

  static variable_list backward(AutogradContext* /*context*/, const variable_list& /*gradients*/) {
    ThrowStatus(core::Status(core::StatusCode::kUnsupported,
                             "ParallelCrossEntropy cannot be differentiated twice; use "
                             "torch::nn::CrossEntropyLoss of logits that are gathered where "
                             "gradients of gradients are needed"));
  }
};

struct LossFunction : torch::autograd::Function<LossFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given,
                            const at::Tensor& target, const std::string& wrong,
                            const ParallelCallsPtr& calls, std::int64_t ignore_index,
                            double smoothing) {
    const std::string invalid =
        wrong.empty() ? WhyRefusedTargets(given, target, ignore_index, *calls) : wrong;
    const bool smooth = smoothing != 0;
    const auto classes = static_cast<double>(calls->split().split.size);
    OwnTargets own;
    at::Tensor exponentials;
    Made told = Make([&] {
      if (!invalid.empty()) return at::Tensor();
      const at::Tensor logits =
          at::isReducedFloatingType(given.scalar_type()) ? given.to(at::kFloat) : given;
      own = OwnTargetsOf(target, *calls);
      return TellOf(logits, own, smooth, &exponentials);
    });
    if (!invalid.empty()) told.invalid = invalid;
    // [ranks, 3 or 4, rows]; each rank adds up in the same order, to the same bits.
    const at::Tensor all = GatherMade(*calls, "loss", told);
    const at::Tensor mosts = all.select(1, 0);
    const at::Tensor most = mosts.amax(0);
    const at::Tensor total =
        (all.select(1, 1) * (mosts - most).exp_()).sum(0).log_().add_(most);  // log-sum-exp
    at::Tensor loss = total - all.select(1, 2).sum(0);
    if (smooth) {
      loss = loss * (1 - smoothing) + (total - all.select(1, 3).sum(0) / classes) * smoothing;
    }
    const at::Tensor ignored = target == ignore_index;
    loss.masked_fill_(ignored, 0);

    if (!given.requires_grad()) return loss;
    const at::Tensor own_most = told.tensor.select(1, 0).squeeze(0);
    exponentials.mul_(AsColumn((own_most - total).exp_()));
    context->save_for_backward({exponentials, own.columns, own.absent, ignored});
    context->saved_data["smoothing"] = smoothing;
    context->saved_data["classes"] = classes;
    context->saved_data["type"] = static_cast<std::int64_t>(given.scalar_type());
    return loss;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor again = at::zeros({}).requires_grad_(at::GradMode::is_enabled());
    const at::Tensor gradient = LossGradient::apply(
        gradients[0].masked_fill(saved[3], 0), saved[0], saved[1], saved[2], again,
        context->saved_data["smoothing"].toDouble(), context->saved_data["classes"].toDouble(),
        static_cast<at::ScalarType>(context->saved_data["type"].toInt()));
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor SplitCrossEntropy(const at::Tensor& logits, const at::Tensor& target,
                             const std::string& wrong, const ParallelCallsPtr& calls,
                             std::int64_t ignore_index, double label_smoothing) {
  return LossFunction::apply(logits, target, wrong, calls, ignore_index, label_smoothing);
}

}  // namespace sirtaki::detail
