#include "core/base/types.h"

namespace sirtaki::core {

std::size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kU8:
    case DType::kI8:
    case DType::kBool:
    case DType::kF8E4M3FN:
    case DType::kF8E4M3FNUZ:
    case DType::kF8E5M2:
    case DType::kF8E5M2FNUZ:
    case DType::kF8E8M0FNU:
      return 1;
    case DType::kI16:
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kI32:
    case DType::kF32:
      return 4;
    case DType::kI64:
    case DType::kF64:
    case DType::kC64:
      return 8;
    case DType::kC128:
      return 16;
  }
  return 0;
}

std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kU8:
      return "uint8";
    case DType::kI8:
      return "int8";
    case DType::kI16:
      return "int16";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF32:
      return "float32";
    case DType::kF64:
      return "float64";
    case DType::kBool:
      return "bool";
    case DType::kC64:
      return "complex64";
    case DType::kC128:
      return "complex128";
    case DType::kF8E4M3FN:
      return "float8_e4m3fn";
    case DType::kF8E4M3FNUZ:
      return "float8_e4m3fnuz";
    case DType::kF8E5M2:
      return "float8_e5m2";
    case DType::kF8E5M2FNUZ:
      return "float8_e5m2fnuz";
    case DType::kF8E8M0FNU:
      return "float8_e8m0fnu";
  }
  return "unknown";
}

bool IsHalf(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }

bool IsFloating(DType dtype) {
  return IsHalf(dtype) || dtype == DType::kF32 || dtype == DType::kF64;
}

bool IsInteger(DType dtype) {
  return dtype == DType::kU8 || dtype == DType::kI8 || dtype == DType::kI16 ||
         dtype == DType::kI32 || dtype == DType::kI64;
}

bool IsComplex(DType dtype) { return dtype == DType::kC64 || dtype == DType::kC128; }

DType PartType(DType dtype) {
  if (dtype == DType::kC64) return DType::kF32;
  return dtype == DType::kC128 ? DType::kF64 : dtype;
}

std::string_view OpKindName(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce:
      return "all-reduce";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kAllGather:
      return "all-gather";
    case OpKind::kAllGatherInto:
      return "all-gather of equal shapes";
    case OpKind::kReduce:
      return "reduce";
    case OpKind::kGather:
      return "gather";
    case OpKind::kScatter:
      return "scatter";
    case OpKind::kAllToAll:
      return "all-to-all";
    case OpKind::kReduceScatter:
      return "reduce-scatter";
    case OpKind::kBarrier:
      return "barrier";
    case OpKind::kAddSet:
      return "adding a process set";
    case OpKind::kRemoveSet:
      return "removing a process set";
    case OpKind::kSetLimits:
      return "change of limits";
    case OpKind::kSend:
      return "send";
    case OpKind::kReceive:
      return "receive";
  }
  return "unknown";
}

bool Reduces(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter;
}

bool HasRoot(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kScatter;
}

bool FirstDimensionVaries(OpKind kind) {
  return kind == OpKind::kAllGather || kind == OpKind::kGather || kind == OpKind::kScatter ||
         kind == OpKind::kAllToAll;
}

std::string_view ReduceOpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAverage:
      return "average";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
    case ReduceOp::kBitAnd:
      return "bitwise and";
    case ReduceOp::kBitOr:
      return "bitwise or";
    case ReduceOp::kBitXor:
      return "bitwise xor";
    case ReduceOp::kAdasum:
      return "Adasum";
  }
  return "unknown";
}

bool IsDefined(ReduceOp op, DType dtype) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return IsInteger(dtype) || IsFloating(dtype) || IsComplex(dtype);
    case ReduceOp::kMin:
    case ReduceOp::kMax:
    case ReduceOp::kProduct:
      return IsInteger(dtype) || IsFloating(dtype) || dtype == DType::kBool;
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return IsInteger(dtype) || dtype == DType::kBool;
    case ReduceOp::kAdasum:
      return IsFloating(dtype);
  }
  return false;
}

}  // namespace sirtaki::core
