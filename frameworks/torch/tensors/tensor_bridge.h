// LibTorch's tensors in the library's words: types, signatures, memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>

#include "core/base/types.h"
#include "core/protocol/request.h"

namespace sirtaki::detail {

// Nothing for a type that the library does not move.
std::optional<core::DType> DTypeOf(at::ScalarType type);

// Why an operation cannot work on this tensor, whatever it is; empty if it can.
std::string WhyNotMovable(const at::Tensor& tensor);

// Data type, kind of device and shape of the tensor; all that WhyNotMovable accepts, and as much as
// can be said of the others: it still names a rejected request for the peers.
core::Signature Describe(const at::Tensor& tensor);
// Whether that is what the signature holds of a tensor that is defined. Allocates nothing.
bool IsDescribedBy(const core::Signature& signature, const at::Tensor& tensor);

// True if the elements lie in memory in row-major order as they are.
bool LiesFlat(const at::Tensor& tensor);
// True if the elements, as they are, lie in memory with these strides, one for each dimension.
bool LiesWith(const at::Tensor& dense, at::IntArrayRef strides);

// The tensor's values lying flat, outside autograd: the tensor's own memory if that is flat, else a
// copy.
at::Tensor Flat(const at::Tensor& tensor);

// What it says; of LibTorch's own errors, which bring a backtrace along, the first line.
std::string TextOf(const std::exception& error);
// Returns the text of the exception that is being handled, whatever it is: never empty. Called in a
// catch block.
std::string TextOfCurrent();

// Returns what a request's `invalid` says when Flat or an allocation has thrown.
std::string WhyNoMemory(const std::exception& error);

// Tells autograd that the tensor's memory was overwritten behind its back.
void NoteOverwritten(const at::Tensor& tensor);

// Grows whenever LibTorch writes the tensor in place.
std::int64_t VersionOf(const at::Tensor& tensor);

// Whether two tensors have the same elements of the same memory, in the same order.
bool HaveSameElements(const at::Tensor& a, const at::Tensor& b);

// "float32 [3, 4]", for texts.
std::string TypeAndShape(const at::Tensor& tensor);

}  // namespace sirtaki::detail
