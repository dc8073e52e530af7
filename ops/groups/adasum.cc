#include "ops/groups/adasum.h"

#include <array>
#include <cstddef>

#include "core/base/check.h"

namespace sirtaki::ops {
namespace {

// Sums are kept in this many lanes, and the lanes added in order: what the compiler may turn into
// vector instructions without changing a bit.
constexpr std::int64_t kLanes = 8;
using Lanes = std::array<double, kLanes>;

double Sum(const Lanes& lanes) {
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <typename T>
AdasumProducts Products(const T* a, const T* b, std::int64_t count) {
  Lanes dot{};
  Lanes a_square{};
  Lanes b_square{};
  const auto add = [&](std::int64_t i, std::size_t lane) {
    const auto x = static_cast<double>(a[i]);
    const auto y = static_cast<double>(b[i]);
    dot[lane] += x * y;
    a_square[lane] += x * x;
    b_square[lane] += y * y;
  };
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane)
      add(i + lane, static_cast<std::size_t>(lane));
  }
  for (; i < count; ++i) add(i, 0);
  return {Sum(dot), Sum(a_square), Sum(b_square)};
}

template <typename T>
void CombineAs(const AdasumFactors& factors, const T* a, const T* b, T* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<T>(factors.a * static_cast<double>(a[i]) +
                           factors.b * static_cast<double>(b[i]));
  }
}

}  // namespace

AdasumProducts operator+(const AdasumProducts& x, const AdasumProducts& y) {
  return {x.dot + y.dot, x.a + y.a, x.b + y.b};
}

AdasumProducts ProductsOf(core::DType dtype, const void* a, const void* b, std::int64_t count) {
  if (dtype == core::DType::kF64) {
    return Products(static_cast<const double*>(a), static_cast<const double*>(b), count);
  }
  SIRTAKI_CHECK(dtype == core::DType::kF32, "Adasum is computed from float32 and float64");
  return Products(static_cast<const float*>(a), static_cast<const float*>(b), count);
}

AdasumFactors FactorsOf(const AdasumProducts& products) {
  AdasumFactors factors;
  if (products.a != 0.0) factors.a -= products.dot / products.a / 2;
  if (products.b != 0.0) factors.b -= products.dot / products.b / 2;
  return factors;
}

void Combine(core::DType dtype, const AdasumFactors& factors, const void* a, const void* b,
             void* to, std::int64_t count) {
  if (dtype == core::DType::kF64) {
    return CombineAs(factors, static_cast<const double*>(a), static_cast<const double*>(b),
                     static_cast<double*>(to), count);
  }
  SIRTAKI_CHECK(dtype == core::DType::kF32, "Adasum is computed from float32 and float64");
  CombineAs(factors, static_cast<const float*>(a), static_cast<const float*>(b),
            static_cast<float*>(to), count);
}

}  // namespace sirtaki::ops
