// The arithmetic of Adasum: two gradients are added as far as they point different ways, and
// averaged as far as they point the same way. Pure.
//
//   result = (1 - <a,b> / 2|a|^2) a + (1 - <a,b> / 2|b|^2) b
//
// Saeed Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
#pragma once

#include <cstdint>

#include "core/base/types.h"

namespace sirtaki::ops {

// The products are those of two vectors a and b, or of parts of them that are added up.
struct AdasumProducts {
  double dot = 0.0;  // <a,b>
  double a = 0.0;    // |a|^2
  double b = 0.0;    // |b|^2
};
AdasumProducts operator+(const AdasumProducts& x, const AdasumProducts& y);

// Computed in double. dtype: kF32 or kF64, of all functions here.
AdasumProducts ProductsOf(core::DType dtype, const void* a, const void* b, std::int64_t count);

struct AdasumFactors {
  double a = 1.0;
  double b = 1.0;
};
// A vector of nothing but zeros leaves the other as it is.
AdasumFactors FactorsOf(const AdasumProducts& products);

// to[i] = factors.a * a[i] + factors.b * b[i], computed in double. `to` may be a or b.
void Combine(core::DType dtype, const AdasumFactors& factors, const void* a, const void* b,
             void* to, std::int64_t count);

}  // namespace sirtaki::ops
