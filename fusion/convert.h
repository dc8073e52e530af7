// Elements on their way into and out of staging memory: widened, scaled, rounded. Tight loops over
// contiguous host memory; reductions of two vectors are in ops/base/kernels.
#pragma once

#include <cstdint>

#include "core/base/types.h"

namespace sirtaki::fusion {

// value * factor / divisor. Floating types compute in their own precision (half types in float32,
// and are rounded once when they are stored); a division is exact division, not a product with a
// reciprocal, unless a factor is given too. Integers are divided with truncation toward zero; with a
// factor they compute in float64, truncate toward zero, and stop at the narrower type's ends.
struct Scale {
  double factor = 1.0;
  std::int64_t divisor = 1;  // at least 1
  bool identity() const { return factor == 1.0 && divisor == 1; }
};

// What a reduction of `dtype` is kept in until it is stored: float32 for float16 and bfloat16; for
// the average of integers the next wider type (int32 for 8 and 16 bits, int64 for int32), so that
// the sum does not wrap before it is divided; else itself.
core::DType AccumulationType(core::DType dtype, core::ReduceOp reduction = core::ReduceOp::kSum);

// out[i] = in[i], converted and scaled. The types are equal, both floating but not the two half
// types, or one is the AccumulationType of the other. Between floating types the scale is computed
// in the wider one; float64 becomes a half type by way of float32, as in LibTorch. Types without an
// arithmetic here (half to the same half, bool) take no scale. The memories are disjoint, or the
// same if the types are. Any alignment that suits the types.
//
// Rounding is to nearest even; subnormals, infinities and the sign of zero are kept; a NaN stays a
// NaN (quiet).
void Convert(core::DType from, const void* in, core::DType to, void* out, std::int64_t count,
             Scale scale = {});

// What is left of the values when they have travelled as `half` (float16 or bfloat16): scaled in
// float32, rounded once, widened again. In place.
void RoundThrough(core::DType half, float* values, std::int64_t count, Scale scale = {});

}  // namespace sirtaki::fusion
