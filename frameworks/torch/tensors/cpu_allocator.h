// Where LibTorch's large CPU tensors lie: in the pool that the ranks of the host share, so that
// gradients are reduced where autograd put them, or in one of the process's own. Smaller ones, and
// what finds no room there, come from the allocator that was there before.
#pragma once

#include <cstddef>
#include <memory>

#include "ops/shm/pool.h"
#include "session/session.h"

namespace sirtaki::detail {

// Tensors from this size on lie in the pool, whose blocks are whole pages.
inline constexpr std::size_t kPoolTensorBytes = 4096;

// The pool that this session's tensors should lie in; null: none.
std::shared_ptr<ops::shm::Pool> PoolForTensors(session::Session& session);

// Takes tensors of this process from `pool` from now on; null: as before. What exists stays
// where it is, and goes back to where it came from whenever it is freed: the pools that were ever
// given here must live as long as the process. Not thread-safe, but other threads may allocate and
// free meanwhile. False if the program has set an allocator of its own, which stays;
// `before_own`: ours goes before it, where that can be.
bool TakeCpuTensorsFrom(ops::shm::Pool* pool, bool before_own);

}  // namespace sirtaki::detail
