// Reductions of two numbers by their definition, and numbers that are worth combining.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/base/types.h"

namespace sirtaki::tests {

template <typename T>
constexpr core::DType DTypeOf() {
  if constexpr (std::is_same_v<T, std::uint8_t>) return core::DType::kU8;
  if constexpr (std::is_same_v<T, std::int8_t>) return core::DType::kI8;
  if constexpr (std::is_same_v<T, std::int16_t>) return core::DType::kI16;
  if constexpr (std::is_same_v<T, std::int32_t>) return core::DType::kI32;
  if constexpr (std::is_same_v<T, std::int64_t>) return core::DType::kI64;
  if constexpr (std::is_same_v<T, float>) return core::DType::kF32;
  if constexpr (std::is_same_v<T, double>) return core::DType::kF64;
  if constexpr (std::is_same_v<T, bool>) return core::DType::kBool;
}

template <typename T>
bool SameBits(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

// Which NaN a sum or a product is, is the processor's choice; minimum and maximum have their own.
template <typename T>
bool Agree(core::ReduceOp op, T a, T b) {
  const bool any_nan = op != core::ReduceOp::kMin && op != core::ReduceOp::kMax;
  if constexpr (std::is_floating_point_v<T>) {
    if (any_nan && std::isnan(a) && std::isnan(b)) return true;
  }
  return SameBits(a, b);
}

template <typename T>
T NaiveFloating(core::ReduceOp op, T a, T b) {
  switch (op) {
    case core::ReduceOp::kSum:
    case core::ReduceOp::kAverage:
      return a + b;
    case core::ReduceOp::kProduct:
      return a * b;
    default:
      break;
  }
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  const bool a_is_less = a < b || (a == b && std::signbit(a));
  return a_is_less == (op == core::ReduceOp::kMin) ? a : b;
}

template <typename T>
T NaiveInteger(core::ReduceOp op, T a, T b) {
  // In 64 bits nothing of the low bits is lost.
  const auto wide_a = static_cast<std::uint64_t>(a);
  const auto wide_b = static_cast<std::uint64_t>(b);
  switch (op) {
    case core::ReduceOp::kMin:
      return std::min(a, b);
    case core::ReduceOp::kMax:
      return std::max(a, b);
    case core::ReduceOp::kProduct:
      return static_cast<T>(wide_a * wide_b);
    case core::ReduceOp::kBitAnd:
      return static_cast<T>(wide_a & wide_b);
    case core::ReduceOp::kBitOr:
      return static_cast<T>(wide_a | wide_b);
    case core::ReduceOp::kBitXor:
      return static_cast<T>(wide_a ^ wide_b);
    default:
      return static_cast<T>(wide_a + wide_b);
  }
}

template <typename T>
T Naive(core::ReduceOp op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return NaiveFloating(op, a, b);
  } else {
    return NaiveInteger(op, a, b);
  }
}

template <typename T>
std::vector<T> WorthCombiningAlone() {
  using Limits = std::numeric_limits<T>;
  std::vector<T> numbers = {T{0}, T{1}};
  if constexpr (std::is_same_v<T, bool>) return numbers;
  for (const int n : {2, 3, 7, 16, 100, 127}) numbers.push_back(static_cast<T>(n));
  numbers.push_back(Limits::max());
  numbers.push_back(Limits::lowest());
  if constexpr (std::is_floating_point_v<T>) {
    for (const T n : {-T{0}, -T{1}, T{0.1}, Limits::min(), Limits::denorm_min(), Limits::infinity(),
                      -Limits::infinity(), Limits::quiet_NaN(), -Limits::quiet_NaN()}) {
      numbers.push_back(n);
    }
  } else {
    numbers.push_back(static_cast<T>(Limits::max() - 1));
    numbers.push_back(static_cast<T>(Limits::lowest() + 1));
    numbers.push_back(static_cast<T>(Limits::max() / 2 + 1));
    numbers.push_back(static_cast<T>(-1));
    numbers.push_back(static_cast<T>(-37));
    numbers.push_back(static_cast<T>(0x1234567890abcdefLL));
  }
  return numbers;
}

template <typename T>
const std::vector<std::pair<T, T>>& WorthCombining() {
  static const std::vector<std::pair<T, T>> pairs = [] {
    const std::vector<T> numbers = WorthCombiningAlone<T>();
    std::vector<std::pair<T, T>> all;
    for (const T a : numbers) {
      for (const T b : numbers) all.emplace_back(a, b);
    }
    return all;
  }();
  return pairs;
}

}  // namespace sirtaki::tests
