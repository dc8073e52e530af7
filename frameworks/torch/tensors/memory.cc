#include "sirtaki/memory.h"

#include "session/base/process_pool.h"

namespace sirtaki {

MemoryUse memory_use() {
  MemoryUse sum;
  for (const auto& pool : session::PoolsOfProcess()) {
    const ops::shm::PoolUse use = pool->Use();
    sum.in_use_bytes += use.in_use_bytes;
    sum.cached_bytes += use.cached_bytes;
    sum.peak_bytes += use.peak_bytes;
    sum.limit_bytes += use.limit_bytes;
    sum.returned_bytes += use.returned_bytes;
    sum.allocations += use.allocations;
    sum.from_heap += use.refusals;
  }
  return sum;
}

void release_memory() {
  for (const auto& pool : session::PoolsOfProcess()) pool->Trim(0);
}

}  // namespace sirtaki
