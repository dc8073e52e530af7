// Reductions of host memory, by dtype. Conversions and scaling are in fusion/convert.
#pragma once

#include <cstdint>
#include <span>

#include "core/base/types.h"
#include "fusion/convert.h"

namespace sirtaki::ops {

// The operation that combines: an average is a sum that is divided afterwards.
inline core::ReduceOp Combining(core::ReduceOp op) {
  return op == core::ReduceOp::kAverage ? core::ReduceOp::kSum : op;
}

// Whether two vectors of this type are combined as they are: the reductions that core::IsDefined
// names, but for average and Adasum, of u8 i8 i16 i32 i64 f32 f64 and bool. Half types are widened
// first; complex numbers are summed as pairs of their parts.
bool HasReduction(core::ReduceOp op, core::DType dtype);

// accumulator[i] = accumulator[i] op addend[i]. Integers wrap. Floating minimum and maximum give a
// NaN if either is one, always the same NaN, and take -0 for less than +0, so that the result does
// not depend on the order of the operands. The memories are disjoint. Precondition:
// HasReduction(op, dtype).
void ReduceInto(core::ReduceOp op, core::DType dtype, void* accumulator, const void* addend,
                std::int64_t count);

// What leaves the other operand as it is: 0 for a sum, the greatest number for a minimum (infinity
// for floating types), 1 for a product, …. `op`: also kAverage and kAdasum (0); dtype: those that
// core::IsDefined names.
void FillIdentity(core::ReduceOp op, core::DType dtype, void* memory, std::int64_t count);

// The reduction of one vector of `count` elements of each member, into each of the outputs: each
// element is widened to its accumulation type (fusion::AccumulationType of dtype and op) and scaled
// by `before`, they are combined in order, and the result is scaled by `after` and rounded once. op
// kAverage combines as kSum: the division is in `after`. There is at least one input; an output is
// an input or disjoint from all of them.
void ReduceMembers(core::ReduceOp op, core::DType dtype, std::span<const void* const> inputs,
                   std::span<void* const> outputs, std::int64_t count, fusion::Scale before,
                   fusion::Scale after);

// ReduceParts reduces vectors that follow each other in `parts` into the first of them.
void ReduceParts(core::ReduceOp op, core::DType dtype, void* parts, std::int64_t members,
                 std::int64_t count, fusion::Scale before, fusion::Scale after);

}  // namespace sirtaki::ops
