// The memory in which a gradient is reduced: its own where the backend sees that, else memory that
// the backend gives.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "session/session.h"

namespace sirtaki::detail {

// The strides that LibTorch's gradient layout contract gives to the gradient of this parameter:
// the parameter's own where its elements lie without gaps, else row-major.
std::vector<std::int64_t> ContractStrides(const at::Tensor& parameter);
// Whether these are they. Mostly allocates nothing.
bool HasContractStrides(const at::Tensor& parameter, at::IntArrayRef strides);

// A tensor like this one, of strides without gaps, in memory that the backend sees, with whatever
// is in it; in LibTorch's own where the backend has none that is better, and on GPUs. Throws what
// allocation throws.
at::Tensor EmptyForBackend(const at::Tensor& like, at::IntArrayRef strides,
                           session::Session& session);

}  // namespace sirtaki::detail
