// Between the suite's arrays and LibTorch's tensors, by raw memory: no kernel of LibTorch is asked
// to fill, copy or compare.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tests/conformance/case_table.h"
#include "tests/conformance/numbers.h"

namespace sirtaki::tests::conformance {

at::ScalarType TypeOf(core::DType dtype);

// A tensor in the layout that its shape class asks for, and the memory that it is a view of.
struct LaidOut {
  at::Tensor tensor;
  at::Tensor memory;  // undefined: the tensor's own
};
LaidOut MakeTensor(const Array& array, ShapeClass shape);

// Why the tensor is not this array; empty if it is. `tolerance`: relative, absolute below 1; 0: bit
// by bit, but any NaN is as good as another where `any_nan`.
std::string WhyNotEqual(const at::Tensor& tensor, const Array& expected, double tolerance,
                        bool any_nan);

// Why the memory around a view has changed; empty if it has not.
std::string WhyTouchedOutside(const LaidOut& laid_out, ShapeClass shape);

}  // namespace sirtaki::tests::conformance
