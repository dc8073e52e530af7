// The elements of the conformance suite's tensors: a function of who holds them and where, so that
// every rank knows those of all. Reductions of them are exact but for the last rounding, so that
// results are compared bit by bit whatever the order of the operands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/types.h"

namespace sirtaki::tests::conformance {

// Contiguous values.
struct Array {
  core::DType dtype = core::DType::kF32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;

  std::int64_t Elements() const;
  std::size_t RowBytes() const;  // of what one index of the first dimension stands for
};
Array MakeArray(core::DType dtype, std::vector<std::int64_t> shape);  // zeros

// Whose elements: of one case's tensor `part` on one rank.
struct Source {
  std::uint64_t problem = 0;
  int part = 0;
  int rank = 0;
};

// Sixty-four bits that depend on all of it.
std::uint64_t Bits(const Source& source, std::int64_t index);

// Any bits of the type: numbers, NaN, infinities; of bool 0 and 1. For movements.
void FillWithBits(const Source& source, Array* array);

// Operands of a reduction. `index` counts parts of complex numbers one by one.
//   integers   any value of the type; for the average of int64, which may wrap, a quarter of them
//   floating   small integers that every floating type holds: up to 255, for a product up to 7;
//              for minimum and maximum with some NaN, infinities and zeros of both signs among
//              them; for Adasum eighths up to 1
std::uint64_t IntegerAt(core::ReduceOp op, core::DType dtype, const Source& source,
                        std::int64_t index);
double FloatAt(core::ReduceOp op, const Source& source, std::int64_t index);

// Stores element `index` (part of a complex number) of the array.
void StoreInteger(Array* array, std::int64_t index, std::uint64_t value);
std::int64_t LoadInteger(const Array& array, std::int64_t index);  // of bool 0 or 1
// From double, rounded once, to nearest even.
void StoreFloat(Array* array, std::int64_t index, double value);
double LoadFloat(const Array& array, std::int64_t index);

void FillOperands(core::ReduceOp op, const Source& source, Array* array);

}  // namespace sirtaki::tests::conformance
