#include "ops/base/bytes.h"

#include <algorithm>
#include <cstring>

#include "core/base/types.h"

namespace sirtaki::ops {

Part PartOf(std::int64_t count, std::int64_t element_bytes, int i, int parts) {
  constexpr std::int64_t kLineBytes = 64;
  const std::int64_t line = std::max<std::int64_t>(1, kLineBytes / element_bytes);
  const std::int64_t even = (count + parts - 1) / parts;
  const std::int64_t step = core::RoundUp(even, line);
  const std::int64_t begin = std::min(i * step, count);
  return {begin, std::min(step, count - begin)};
}

void Copy(void* to, const void* from, std::int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace sirtaki::ops
