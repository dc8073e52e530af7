// Reductions of host memory, by dtype. Conversions and scaling are in fusion/convert.
#pragma once

#include <cstdint>

#include "core/types.h"
#include "fusion/convert.h"

namespace sirtaki::ops {

// True for the types that are summed as they are: u8 i8 i16 i32 i64 f32 f64. Half types are widened
// first.
bool HasSum(core::DType dtype);

// accumulator[i] += addend[i]. Integers wrap. The memories are disjoint. Precondition:
// HasSum(dtype).
void AddInto(core::DType dtype, void* accumulator, const void* addend, std::int64_t count);

// The reduction of `members` vectors of `count` float16 or bfloat16 elements that follow each other
// in `parts`, into the first of them: each is widened to float32 and scaled by `before`, they are
// added in order, and the sum is scaled by `after` and rounded once.
void ReduceHalf(core::DType dtype, void* parts, std::int64_t members, std::int64_t count,
                fusion::Scale before, fusion::Scale after);

}  // namespace sirtaki::ops
