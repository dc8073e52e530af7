// Reductions of host memory, by dtype. Conversions and scaling are in fusion/convert.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace sirtaki::ops {

// True for the types that are summed as they are: u8 i8 i16 i32 i64 f32 f64. Half types are widened
// first.
bool HasSum(core::DType dtype);

// accumulator[i] += addend[i]. Integers wrap. The memories are disjoint. Precondition:
// HasSum(dtype).
void AddInto(core::DType dtype, void* accumulator, const void* addend, std::int64_t count);

}  // namespace sirtaki::ops
