#include "frameworks/torch/gradients/gradient_rule.h"

#include <cmath>
#include <sstream>

namespace sirtaki::detail {

std::string WhyInvalid(const DistributedOptimizerOptions& options, bool of_module) {
  std::ostringstream why;
  const double factor = options.gradient_predivide_factor();
  const bool is_average = options.op() == ReduceOp::Average;
  const bool is_adasum = options.op() == ReduceOp::Adasum;
  if (!is_average && !is_adasum && options.op() != ReduceOp::Sum) {
    why << "op has to be Average, Sum or Adasum for gradients";
  } else if (is_adasum && of_module) {
    why << "op Adasum combines what steps have changed, and a module does not know of steps: use "
           "DistributedOptimizer";
  } else if (is_adasum && options.compression() != Compression::None) {
    why << "op Adasum does not go with compression";
  } else if (!std::isfinite(factor) || factor <= 0 || !std::isfinite(1 / factor)) {
    why << "gradient_predivide_factor is " << factor << "; it has to be a positive number";
  } else if (factor != 1.0 && !is_average) {
    why << "gradient_predivide_factor is " << factor << "; other values than 1 need op Average";
  } else if (options.backward_passes_per_step() < 1) {
    why << "backward_passes_per_step is " << options.backward_passes_per_step()
        << "; it has to be at least 1";
  } else if (of_module && options.backward_passes_per_step() != 1) {
    why << "backward_passes_per_step is " << options.backward_passes_per_step()
        << "; a module does not know of steps: accumulate in scopes of no_sync()";
  } else if (of_module && options.average_at() != Average::Backward) {
    why << "average_at is Step, and a module does not know of steps: use DistributedOptimizer";
  } else if (options.shard() != Shard::None && (of_module || is_adasum)) {
    why << "shard is set, and "
        << (of_module ? "a module has no optimizer: use DistributedOptimizer"
                      : "op Adasum combines what steps of whole parameters have changed");
  } else if (options.shard_over() == ShardOver::Host &&
             options.process_set().id() != core::kWorldSet) {
    why << "shard_over is Host, and the optimizer is of a process set: shards over hosts need all "
           "ranks of the job";
  } else if (options.fused() && of_module) {
    why << "fused says how steps are made, and a module does not know of steps: use "
           "DistributedOptimizer";
  } else if (options.check_parameters_every() < 0) {
    why << "check_parameters_every is " << options.check_parameters_every()
        << "; it has to be a number of steps, or 0 for never";
  } else if (options.hook() &&
             (!is_average || factor != 1.0 || options.compression() != Compression::None)) {
    why << "a hook does not go with op, gradient_predivide_factor or compression: the hook decides";
  }
  return why.str();
}

GradientRule MakeRule(const DistributedOptimizerOptions& options, bool of_module, int ranks) {
  GradientRule rule;
  rule.set = options.process_set().id();
  if (options.op() == ReduceOp::Sum) rule.reduction = core::ReduceOp::kSum;
  if (options.op() == ReduceOp::Adasum) rule.reduction = core::ReduceOp::kAdasum;
  rule.predivide = options.gradient_predivide_factor();
  rule.compression = options.compression();
  rule.scope = options.compression_scope();
  rule.passes = options.backward_passes_per_step();
  rule.of_module = of_module;
  rule.at_backward = of_module || (options.average_at() == Average::Backward && !rule.of_steps());
  rule.sparse_as_dense = options.sparse_as_dense();
  rule.alone = ranks == 1 && rule.at_backward && !rule.sparse_as_dense;
  rule.has_hook = options.hook() != nullptr;
  if (ranks > 1) rule.hook = options.hook();
  rule.keeps_shards = ranks > 1 && options.shard() == Shard::Gradients;
  rule.check_every = options.check_parameters_every();
  return rule;
}

bool CanShare(const GradientRule& a, const GradientRule& b) {
  const bool is_average = a.reduction == core::ReduceOp::kAverage;
  return is_average && !a.has_hook && !b.has_hook && !a.of_module && !a.keeps_shards &&
         ToText(a) == ToText(b);
}

std::string ToText(const GradientRule& rule) {
  std::ostringstream text;
  text.precision(17);
  text << core::ReduceOpName(rule.reduction);
  if (rule.set != core::kWorldSet) text << " in process set " << rule.set;
  if (rule.predivide != 1.0) text << ", predivided by " << rule.predivide;
  if (rule.compression != Compression::None) {
    text << (rule.compression == Compression::F16 ? ", float16 " : ", bfloat16 ")
         << (rule.scope == CompressionScope::Everywhere ? "everywhere" : "between hosts");
  }
  if (rule.passes != 1) text << ", " << rule.passes << " backward passes";
  if (rule.sparse_as_dense) text << ", sparse as dense";
  if (rule.keeps_shards) text << ", kept in shards";
  if (rule.of_module) text << ", after backward";
  if (!rule.at_backward && !rule.of_steps()) text << ", in step()";
  if (rule.has_hook) text << ", by a hook";
  return text.str();
}

}  // namespace sirtaki::detail
