#include "tests/conformance/numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "tests/support/half_reference.h"

namespace sirtaki::tests::conformance {
namespace {

using core::DType;

std::uint64_t Mix(std::uint64_t state) {
  state += 0x9e3779b97f4a7c15U;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9U;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebU;
  return state ^ (state >> 31);
}

template <typename T>
void Store(Array* array, std::int64_t index, T value) {
  std::memcpy(array->bytes.data() + static_cast<std::size_t>(index) * sizeof(T), &value, sizeof(T));
}

template <typename T>
T Load(const Array& array, std::int64_t index) {
  T value;
  std::memcpy(&value, array.bytes.data() + static_cast<std::size_t>(index) * sizeof(T), sizeof(T));
  return value;
}

// A NaN as LibTorch and IEEE hardware write one: quiet, without payload.
std::uint16_t EncodeHalf(const SmallFloat& type, double value) {
  if (!std::isnan(value)) return type.Encode(value);
  const int exponent = type.greatest_exponent - type.least_exponent + 2;
  return static_cast<std::uint16_t>((exponent << type.mantissa_bits) |
                                    (1 << (type.mantissa_bits - 1)));
}

}  // namespace

std::int64_t Array::Elements() const {
  std::int64_t count = 1;
  for (std::int64_t dimension : shape) count *= dimension;
  return count;
}

std::size_t Array::RowBytes() const {
  std::size_t count = core::SizeOf(dtype);
  for (std::size_t i = 1; i < shape.size(); ++i) count *= static_cast<std::size_t>(shape[i]);
  return count;
}

Array MakeArray(core::DType dtype, std::vector<std::int64_t> shape) {
  Array array{dtype, std::move(shape), {}};
  array.bytes.resize(static_cast<std::size_t>(array.Elements()) * core::SizeOf(dtype));
  return array;
}

std::uint64_t Bits(const Source& source, std::int64_t index) {
  const std::uint64_t who = source.problem * 64 + static_cast<std::uint64_t>(source.part) * 8 +
                            static_cast<std::uint64_t>(source.rank);
  return Mix(Mix(who) + static_cast<std::uint64_t>(index));
}

void FillWithBits(const Source& source, Array* array) {
  for (std::size_t i = 0; i < array->bytes.size(); i += sizeof(std::uint64_t)) {
    std::uint64_t bits = Bits(source, static_cast<std::int64_t>(i));
    if (array->dtype == DType::kBool) bits &= 0x0101010101010101U;
    std::memcpy(array->bytes.data() + i, &bits, std::min(sizeof(bits), array->bytes.size() - i));
  }
}

std::uint64_t IntegerAt(core::ReduceOp op, core::DType dtype, const Source& source,
                        std::int64_t index) {
  const std::uint64_t bits = Bits(source, index);
  if (dtype == DType::kBool) return bits & 1;
  if (op != core::ReduceOp::kAverage || dtype != DType::kI64) return bits;
  return static_cast<std::uint64_t>(static_cast<std::int64_t>(bits) / 4);
}

double FloatAt(core::ReduceOp op, const Source& source, std::int64_t index) {
  const std::uint64_t bits = Bits(source, index);
  const auto within = [bits](int bound) {
    return static_cast<double>(bits % static_cast<std::uint64_t>(2 * bound + 1)) - bound;
  };
  if (op == core::ReduceOp::kProduct) return within(7);
  if (op == core::ReduceOp::kAdasum) return within(8) / 8;
  if (op == core::ReduceOp::kMin || op == core::ReduceOp::kMax) {
    switch ((bits >> 32) % 16) {
      case 0:
        return std::numeric_limits<double>::quiet_NaN();
      case 1:
        return 0.0;
      case 2:
        return -0.0;
      case 3:
        return std::numeric_limits<double>::infinity();
      case 4:
        return -std::numeric_limits<double>::infinity();
      default:
        break;
    }
  }
  return within(255);
}

void StoreInteger(Array* array, std::int64_t index, std::uint64_t value) {
  switch (core::SizeOf(array->dtype)) {
    case 1:
      return Store(array, index, static_cast<std::uint8_t>(value));
    case 2:
      return Store(array, index, static_cast<std::uint16_t>(value));
    case 4:
      return Store(array, index, static_cast<std::uint32_t>(value));
    default:
      return Store(array, index, value);
  }
}

std::int64_t LoadInteger(const Array& array, std::int64_t index) {
  switch (array.dtype) {
    case DType::kI8:
      return Load<std::int8_t>(array, index);
    case DType::kI16:
      return Load<std::int16_t>(array, index);
    case DType::kI32:
      return Load<std::int32_t>(array, index);
    case DType::kI64:
      return Load<std::int64_t>(array, index);
    default:
      return Load<std::uint8_t>(array, index);
  }
}

void StoreFloat(Array* array, std::int64_t index, double value) {
  switch (core::PartType(array->dtype)) {
    case DType::kF16:
      return Store(array, index, EncodeHalf(kFloat16, value));
    case DType::kBF16:
      return Store(array, index, EncodeHalf(kBFloat16, value));
    case DType::kF32:
      return Store(array, index, static_cast<float>(value));
    default:
      return Store(array, index, value);
  }
}

double LoadFloat(const Array& array, std::int64_t index) {
  switch (core::PartType(array.dtype)) {
    case DType::kF16:
      return kFloat16.Decode(Load<std::uint16_t>(array, index));
    case DType::kBF16:
      return kBFloat16.Decode(Load<std::uint16_t>(array, index));
    case DType::kF32:
      return Load<float>(array, index);
    default:
      return Load<double>(array, index);
  }
}

void FillOperands(core::ReduceOp op, const Source& source, Array* array) {
  const std::int64_t count = array->Elements() * (core::IsComplex(array->dtype) ? 2 : 1);
  const bool floating = core::IsFloating(core::PartType(array->dtype));
  for (std::int64_t i = 0; i < count; ++i) {
    if (floating) {
      StoreFloat(array, i, FloatAt(op, source, i));
    } else {
      StoreInteger(array, i, IntegerAt(op, array->dtype, source, i));
    }
  }
}

}  // namespace sirtaki::tests::conformance
