#include "ops/validate.h"

#include <cmath>
#include <cstdint>

namespace sirtaki::ops {
namespace {

std::string ValidateShape(const core::Signature& signature) {
  // Products are checked without zeros: a shape is as wrong with an empty dimension beside.
  auto bytes = static_cast<std::int64_t>(core::SizeOf(signature.dtype));
  for (const std::int64_t length : signature.shape) {
    if (length < 0) return "a dimension is negative: " + std::to_string(length);
    if (length > 0 && __builtin_mul_overflow(bytes, length, &bytes)) {
      return "the tensor's bytes do not fit into 64 bits";
    }
  }
  return {};
}

std::string ValidateWire(const core::Signature& signature) {
  if (!signature.wire) return {};
  if (signature.kind != core::OpKind::kAllReduce) return "compression is for all-reduce only";
  if (signature.dtype != core::DType::kF32 && signature.dtype != core::DType::kF64) {
    return "compression is for float32 and float64, not for " +
           std::string(core::DTypeName(signature.dtype));
  }
  if (*signature.wire != core::DType::kF16 && *signature.wire != core::DType::kBF16) {
    return "compression is to float16 or bfloat16, not to " +
           std::string(core::DTypeName(*signature.wire));
  }
  return {};
}

std::string ValidateFactor(const char* name, double factor, const core::Signature& signature) {
  if (factor == 1.0) return {};
  if (signature.kind != core::OpKind::kAllReduce) {
    return std::string(name) + " is for all-reduce only";
  }
  if (!std::isfinite(factor)) return std::string(name) + " must be a finite number";
  if (!core::IsFloating(signature.dtype)) {
    return std::string(name) + " other than 1 needs a floating point type, not " +
           std::string(core::DTypeName(signature.dtype));
  }
  return {};
}

}  // namespace

std::string ValidateRequest(const core::Signature& signature, const core::RankRanges& members,
                            int dimensions) {
  if (signature.device != core::DeviceKind::kHost) {
    return "tensors on a GPU are not supported yet: move it to the CPU";
  }
  if (std::string why = ValidateShape(signature); !why.empty()) return why;
  const auto kind = std::string(core::OpKindName(signature.kind));
  if (signature.kind == core::OpKind::kAllReduce) {
    if (signature.dtype == core::DType::kBool) {
      return "all-reduce of bool is not supported: convert it to uint8, whose sum wraps at 256";
    }
  } else if (signature.reduction != core::ReduceOp::kSum) {
    return kind + " does not reduce: it takes no " +
           std::string(core::ReduceOpName(signature.reduction));
  }
  if (signature.kind == core::OpKind::kAllGather && dimensions < 1) {
    return "all-gather joins tensors along their first dimension, and this one has none: reshape "
           "it "
           "to [1]";
  }
  if (signature.kind == core::OpKind::kBroadcast) {
    if (!members.Contains(signature.root)) {
      return "root rank " + std::to_string(signature.root) + " is not among the ranks " +
             members.ToString();
    }
  } else if (signature.root != -1) {
    return kind + " has no root";
  }
  if (std::string why = ValidateWire(signature); !why.empty()) return why;
  if (std::string why = ValidateFactor("prescale", signature.prescale, signature); !why.empty()) {
    return why;
  }
  return ValidateFactor("postscale", signature.postscale, signature);
}

}  // namespace sirtaki::ops
