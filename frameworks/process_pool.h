// The shared pool of this process. One, whatever sessions come and go.
#pragma once

#include <memory>

#include "core/config.h"
#include "ops/shm/pool.h"

namespace sirtaki::frameworks {

// Makes it at the first call, with the size that the options say. Null if there can be none, with a
// warning, or shared memory is off. Thread-safe.
std::shared_ptr<ops::shm::Pool> PoolOfProcess(const core::Config& config);

}  // namespace sirtaki::frameworks
