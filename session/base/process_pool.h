// The pools of this process: one that the ranks of its host share, and one for a process that
// shares with nobody. Each is made once, whatever sessions come and go: tensors outlive them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/config/config.h"
#include "ops/shm/pool.h"

namespace sirtaki::session {

// How large a pool is: what the options say, or else this rank's share of the host's memory or of
// what its cgroup allows. Addresses are few where the process's are limited, since every rank maps
// the pools of all `local_size` of them.
ops::shm::PoolOptions SizeOfPool(std::int64_t pool_bytes, std::int64_t memory_of_host,
                                 std::int64_t address_limit, int local_size);

// The shared pool is made at the first call; each later one sets its limit, as far as the addresses
// of the first one go. Null if there can be none, with a warning, or shared memory is off.
// Thread-safe.
std::shared_ptr<ops::shm::Pool> PoolOfProcess(const core::Config& config, int local_size);

// The private pool has memory that this process alone sees.
std::shared_ptr<ops::shm::Pool> PrivatePoolOfProcess(const core::Config& config, int local_size);

// The pools are those of the two that have been made.
std::vector<std::shared_ptr<ops::shm::Pool>> PoolsOfProcess();

}  // namespace sirtaki::session
