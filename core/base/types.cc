#include "core/base/types.h"

#include <iterator>

#include "core/base/text.h"

namespace sirtaki::core {

namespace {

// The tables are in the order of the enumerations.
struct TypeFacts {
  std::string_view name;
  std::size_t size;
};
constexpr TypeFacts kTypes[] = {{"uint8", 1},         {"int8", 1},
                                {"int16", 2},         {"int32", 4},
                                {"int64", 8},         {"float16", 2},
                                {"bfloat16", 2},      {"float32", 4},
                                {"float64", 8},       {"bool", 1},
                                {"complex64", 8},     {"complex128", 16},
                                {"float8_e4m3fn", 1}, {"float8_e4m3fnuz", 1},
                                {"float8_e5m2", 1},   {"float8_e5m2fnuz", 1},
                                {"float8_e8m0fnu", 1}};
static_assert(std::size(kTypes) == kDTypeCount);
// clang-format off
constexpr std::string_view kKinds[] = {
    "all-reduce", "broadcast", "all-gather", "all-gather of equal shapes", "reduce", "gather",
    "scatter", "all-to-all", "reduce-scatter", "barrier", "making of an arena", "send", "receive"};
constexpr std::string_view kReductions[] = {
    "sum", "average", "min", "max", "product", "bitwise and", "bitwise or", "bitwise xor", "Adasum"};
// clang-format on
static_assert(std::size(kKinds) == kOpKindCount);
static_assert(std::size(kReductions) == kReduceOpCount);

}  // namespace

std::size_t SizeOf(DType dtype) {
  const auto index = static_cast<std::size_t>(dtype);
  return index < std::size(kTypes) ? kTypes[index].size : 0;
}

std::string_view DTypeName(DType dtype) {
  const auto index = static_cast<std::size_t>(dtype);
  return index < std::size(kTypes) ? kTypes[index].name : "unknown";
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

std::string_view OpKindName(OpKind kind) { return NameIn(kKinds, kind); }

std::string_view ReduceOpName(ReduceOp op) { return NameIn(kReductions, op); }

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
