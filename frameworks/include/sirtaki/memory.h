// While the option `allocator` is in force, LibTorch's large CPU tensors, gradients among them, lie
// in memory of the library. docs/memory.md says how it works.
#pragma once

#include <cstdint>

#include "sirtaki/export.h"

namespace sirtaki {

// MemoryUse counts that memory of this process, in bytes of whole blocks. All fields are zero where
// there is no such memory.
struct MemoryUse {
  std::int64_t in_use_bytes = 0;
  std::int64_t cached_bytes = 0;    // freed, and kept for the next tensor
  std::int64_t peak_bytes = 0;      // the most that was in use
  std::int64_t limit_bytes = 0;     // the option pool_bytes
  std::int64_t returned_bytes = 0;  // given back to the system so far
  std::int64_t allocations = 0;
  std::int64_t from_heap = 0;  // requests that found no room
};

// Returns the use of that memory. May be called at any time, by any thread, also before init() and
// after shutdown().
SIRTAKI_API MemoryUse memory_use();

// Gives the memory that is kept back to the system. The library also does it by itself now and
// then: it keeps at most what was in use in the last 10 to 20 seconds, or 64 MiB. May be called as
// memory_use() may.
SIRTAKI_API void release_memory();

}  // namespace sirtaki
