// Pinned pages of the host, in blocks for one message each, which are used again: taking them from
// CUDA costs as much as sending megabytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "ops/cuda/device.h"

namespace sirtaki::ops::nccl {

// Thread-safe. A block that comes back waits here for the next message of about its size; what is
// kept beyond a limit is freed by a later Take, never by whoever gives a block back: freeing may
// wait for the device. May go before its blocks.
class PinnedBlocks {
 public:
  explicit PinnedBlocks(std::shared_ptr<cuda::Device> device);
  // Frees those that nobody has; the others as they come back.
  ~PinnedBlocks();
  PinnedBlocks(const PinnedBlocks&) = delete;
  PinnedBlocks& operator=(const PinnedBlocks&) = delete;

  // Take gives at least `bytes`, which is more than 0. The calling thread's device is this one.
  // Errors: those of CUDA.
  core::Status Take(std::int64_t bytes, std::shared_ptr<std::byte>* block);

 private:
  struct Shared {
    std::shared_ptr<cuda::Device> device;
    core::Mutex mutex;
    std::multimap<std::int64_t, std::byte*> free SIRTAKI_GUARDED_BY(mutex);  // by size
    std::int64_t free_bytes SIRTAKI_GUARDED_BY(mutex) = 0;
    bool closed SIRTAKI_GUARDED_BY(mutex) = false;

    std::byte* FindFree(std::int64_t bytes, std::int64_t* size) SIRTAKI_EXCLUDES(mutex);
    void Trim(std::int64_t kept) SIRTAKI_EXCLUDES(mutex);
    void Return(std::byte* memory, std::int64_t size) SIRTAKI_EXCLUDES(mutex);
  };
  const std::shared_ptr<Shared> shared_;
};

}  // namespace sirtaki::ops::nccl
