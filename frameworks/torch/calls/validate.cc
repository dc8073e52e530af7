#include "frameworks/torch/calls/validate.h"

#include <cmath>
#include <cstdint>

#include "core/base/types.h"

namespace sirtaki::detail {
namespace {

using core::DType;
using core::OpKind;
using core::ReduceOp;

std::string KindOf(const core::Signature& signature) {
  return std::string(core::OpKindName(signature.kind));
}

// "uint8, int8 and bool": those for which the reduction is defined.
std::string TypesOf(ReduceOp op) {
  std::string text;
  std::string last;
  for (int i = 0; i < core::kDTypeCount; ++i) {
    if (!core::IsDefined(op, static_cast<DType>(i))) continue;
    if (!last.empty()) text += (text.empty() ? "" : ", ") + last;
    last = core::DTypeName(static_cast<DType>(i));
  }
  return text + " and " + last;
}

std::string OperationsOf(DType dtype, OpKind kind) {
  std::string text;
  for (int i = 0; i < core::kReduceOpCount; ++i) {
    const auto op = static_cast<ReduceOp>(i);
    if (!core::IsDefined(op, dtype)) continue;
    if (op == ReduceOp::kAdasum && kind != OpKind::kAllReduce) continue;
    text += (text.empty() ? "" : ", ") + std::string(core::ReduceOpName(op));
  }
  return text;
}

std::string ValidateShape(const core::Signature& signature, const OwnTensor& own) {
  // Products are checked without zeros: a shape is as wrong with an empty dimension beside.
  std::int64_t bytes = BytesOf(signature.dtype);
  if (core::FirstDimensionVaries(signature.kind) && own.rows > 0 &&
      __builtin_mul_overflow(bytes, own.rows, &bytes)) {
    return "the tensor's bytes do not fit into 64 bits";
  }
  for (const std::int64_t length : signature.shape) {
    if (length > 0 && __builtin_mul_overflow(bytes, length, &bytes)) {
      return "the tensor's bytes do not fit into 64 bits";
    }
  }
  return {};
}

std::string ValidateRoot(const core::Signature& signature, const core::RankRanges& members) {
  if (!core::HasRoot(signature.kind) || members.Contains(signature.root)) return {};
  return "root rank " + std::to_string(signature.root) + " is not among the ranks " +
         members.ToString();
}

// Checks the dimensions for the kinds that deal with rows.
std::string ValidateDimensions(const core::Signature& signature, const OwnTensor& own) {
  const char* what = nullptr;
  switch (signature.kind) {
    case OpKind::kAllGather:
    case OpKind::kAllGatherInto:
    case OpKind::kGather:
      what = " joins tensors along their first dimension";
      break;
    case OpKind::kReduceScatter:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
      what = " divides tensors along their first dimension";
      break;
    default:
      return {};
  }
  if (own.dimensions > 0) return {};
  return KindOf(signature) + what + ", and this one has none: reshape it to [1]";
}

std::string ValidateSplits(const core::Signature& signature, const core::RankRanges& members,
                           const OwnTensor& own) {
  const std::int64_t count = members.Count();
  if (own.splits.empty()) {
    if (signature.kind != OpKind::kAllToAll || own.rows % count == 0) return {};
    return "the first dimension, " + std::to_string(own.rows) +
           ", cannot be divided into equal parts for " + std::to_string(count) +
           " ranks: give splits";
  }
  if (signature.kind == OpKind::kScatter && own.rank != signature.root) return {};
  if (static_cast<std::int64_t>(own.splits.size()) != count) {
    return std::to_string(own.splits.size()) + " splits were given for " + std::to_string(count) +
           " ranks: there must be one for each";
  }
  std::int64_t sum = 0;
  for (const std::int64_t split : own.splits) {
    if (split < 0) return "a split is negative: " + std::to_string(split);
    if (__builtin_add_overflow(sum, split, &sum)) return "the splits do not fit into 64 bits";
  }
  if (sum == own.rows) return {};
  return "the splits add up to " + std::to_string(sum) + ", but the first dimension is " +
         std::to_string(own.rows);
}

std::string ValidateWire(const core::Signature& signature) {
  if (!signature.wire || signature.reduction == ReduceOp::kSum ||
      signature.reduction == ReduceOp::kAverage) {
    return {};
  }
  return "compression is for sum and average, not for " +
         std::string(core::ReduceOpName(signature.reduction));
}

std::string ValidateFactor(const char* name, double factor, const core::Signature& signature) {
  if (factor == 1.0) return {};
  if (!std::isfinite(factor)) return std::string(name) + " must be a finite number";
  if (!core::IsFloating(signature.dtype) && !core::IsInteger(signature.dtype)) {
    return std::string(name) + " other than 1 needs a floating point or integer type, not " +
           std::string(core::DTypeName(signature.dtype));
  }
  return {};
}

}  // namespace

std::string ValidateReduction(const core::Signature& signature) {
  if (!core::Reduces(signature.kind)) return {};
  if (signature.reduction == ReduceOp::kAdasum && signature.kind != OpKind::kAllReduce) {
    return "Adasum is for all-reduce only, not for " + KindOf(signature);
  }
  if (core::IsDefined(signature.reduction, signature.dtype)) return {};
  const std::string op(core::ReduceOpName(signature.reduction));
  const std::string dtype(core::DTypeName(signature.dtype));
  const std::string operations = OperationsOf(signature.dtype, signature.kind);
  return op + " is not defined for " + dtype + ": " +
         (operations.empty() ? dtype + " has no reduction at all"
                             : dtype + " takes " + operations) +
         "; " + op + " takes " + TypesOf(signature.reduction);
}

std::string ValidateRequest(const core::Signature& signature, const core::RankRanges& members,
                            const OwnTensor& own) {
  if (std::string why = ValidateShape(signature, own); !why.empty()) return why;
  if (std::string why = ValidateReduction(signature); !why.empty()) return why;
  if (std::string why = ValidateRoot(signature, members); !why.empty()) return why;
  if (std::string why = ValidateDimensions(signature, own); !why.empty()) return why;
  if (std::string why = ValidateSplits(signature, members, own); !why.empty()) return why;
  if (std::string why = ValidateWire(signature); !why.empty()) return why;
  if (std::string why = ValidateFactor("prescale", signature.prescale, signature); !why.empty()) {
    return why;
  }
  return ValidateFactor("postscale", signature.postscale, signature);
}

}  // namespace sirtaki::detail
