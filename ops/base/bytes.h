// Parts of vectors and copies of bytes, for all backends.
#pragma once

#include <cstdint>

namespace sirtaki::ops {

// Some elements of a vector.
struct Part {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};
// One of `parts` nearly equal parts of `count` elements, in whole cache lines.
Part PartOf(std::int64_t count, std::int64_t element_bytes, int i, int parts);

// memcpy that takes no bytes, null pointers with them, and a copy onto itself.
void Copy(void* to, const void* from, std::int64_t bytes);

}  // namespace sirtaki::ops
