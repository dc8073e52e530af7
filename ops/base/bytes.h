// Sizes and copies in bytes, for all backends.
#pragma once

#include <cstdint>

#include "core/base/types.h"

namespace sirtaki::ops {

// The size of one element.
std::int64_t BytesOf(core::DType dtype);

// memcpy that takes no bytes, null pointers with them, and a copy onto itself.
void Copy(void* to, const void* from, std::int64_t bytes);

}  // namespace sirtaki::ops
