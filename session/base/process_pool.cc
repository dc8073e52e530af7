#include "session/base/process_pool.h"

#include <algorithm>

#include "core/base/log.h"
#include "core/base/thread_annotations.h"
#include "core/machine/memory_limit.h"

namespace sirtaki::session {

namespace {

// Never destroyed: tensors are freed while the process exits.
struct OnePool {
  core::Mutex mutex;
  std::shared_ptr<ops::shm::Pool> pool SIRTAKI_GUARDED_BY(mutex);

  std::shared_ptr<ops::shm::Pool> Get(const core::Config& config, int local_size, bool shared) {
    core::MutexLock lock(mutex);
    ops::shm::PoolOptions options =
        SizeOfPool(config.pool_bytes, core::MemoryOfHost(), core::AddressLimit(), local_size);
    if (pool != nullptr) {
      pool->SetLimit(options.bytes);
      return pool;
    }
    options.shared = shared;
    const core::Status status = ops::shm::Pool::Make(options, &pool);
    if (!status.ok()) {
      // A process without a pool of its own does as well as without us.
      core::Log(shared ? core::LogLevel::kWarning : core::LogLevel::kInfo,
                "this rank has no pool of memory: " + status.message());
    }
    return pool;
  }
};

OnePool& Shared() {
  static OnePool& one = *new OnePool;
  return one;
}

OnePool& Private() {
  static OnePool& one = *new OnePool;
  return one;
}

}  // namespace

ops::shm::PoolOptions SizeOfPool(std::int64_t pool_bytes, std::int64_t memory_of_host,
                                 std::int64_t address_limit, int local_size) {
  const std::int64_t ranks = std::max(local_size, 1);
  ops::shm::PoolOptions options;
  options.bytes = pool_bytes > 0 ? pool_bytes : memory_of_host / ranks;
  options.address_bytes = 4 * options.bytes;
  if (address_limit > 0) {
    options.address_bytes = std::min(options.address_bytes, address_limit / (4 * ranks));
    options.bytes = std::min(options.bytes, options.address_bytes);
  }
  return options;
}

std::shared_ptr<ops::shm::Pool> PoolOfProcess(const core::Config& config, int local_size) {
  if (config.shared_memory == core::SharedMemoryMode::kOff) return nullptr;
  return Shared().Get(config, local_size, true);
}

std::shared_ptr<ops::shm::Pool> PrivatePoolOfProcess(const core::Config& config, int local_size) {
  return Private().Get(config, local_size, false);
}

std::vector<std::shared_ptr<ops::shm::Pool>> PoolsOfProcess() {
  std::vector<std::shared_ptr<ops::shm::Pool>> pools;
  for (OnePool* one : {&Shared(), &Private()}) {
    core::MutexLock lock(one->mutex);
    if (one->pool != nullptr) pools.push_back(one->pool);
  }
  return pools;
}

}  // namespace sirtaki::session
