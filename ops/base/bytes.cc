#include "ops/base/bytes.h"

#include <cstring>

namespace sirtaki::ops {

std::int64_t BytesOf(core::DType dtype) { return static_cast<std::int64_t>(core::SizeOf(dtype)); }

void Copy(void* to, const void* from, std::int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace sirtaki::ops
