#include "frameworks/process_pool.h"

#include <unistd.h>

#include <cstdint>
#include <string>

#include "core/log.h"
#include "core/thread_annotations.h"

namespace sirtaki::frameworks {

namespace {

std::int64_t MemoryOfHost() {
  return static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

}  // namespace

std::shared_ptr<ops::shm::Pool> PoolOfProcess(const core::Config& config) {
  if (config.shared_memory == core::SharedMemoryMode::kOff) return nullptr;
  static core::Mutex& mutex = *new core::Mutex;
  static auto& pool = *new std::shared_ptr<ops::shm::Pool>;
  core::MutexLock lock(mutex);
  if (pool == nullptr) {
    const std::int64_t bytes = config.pool_bytes > 0 ? config.pool_bytes : MemoryOfHost();
    const core::Status status = ops::shm::Pool::Make(bytes, &pool);
    if (!status.ok()) {
      SIRTAKI_LOG(kWarning, "no memory is shared with the ranks of this host: " + status.message());
    }
  }
  return pool;
}

}  // namespace sirtaki::frameworks
