#include "core/base/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace sirtaki::core {

std::uint64_t Digest(const void* data, std::size_t bytes) { return XXH3_64bits(data, bytes); }

}  // namespace sirtaki::core
