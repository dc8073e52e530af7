// Memory on a device through which groups of tensors pass, and the pages of the host beside it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "ops/cuda/device.h"
#include "ops/nccl/communicator.h"

namespace sirtaki::ops::nccl {

// A block of a GPU's memory is from NCCL's own allocator, or plain.
struct GpuBlock {
  void* memory = nullptr;
  bool of_nccl = false;

  // False: NCCL gives none.
  bool TakeFromNccl(const Api& nccl, const cuda::Api& cuda, std::int64_t bytes);
  void Free(const Api& nccl, const cuda::Api& cuda) const;
};

// The memory comes from NCCL's own allocator, or is plain. It is not registered with the
// communicator: a call wants the memory of all ranks to be or of none, and one may pack where
// another does not. Grows by doubling when it is small; what was outgrown may be in use by the
// stream and is kept: freeing waits for the device.
//
// Used by the lane's thread. The communicator must outlive it.
class DeviceMemory {
 public:
  DeviceMemory(const cuda::Api& cuda, Communicator& communicator)
      : cuda_(cuda), communicator_(communicator) {}
  // Precondition: the stream is through with it.
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // Reserve gives at least `bytes`; what was there before is lost if the memory has to grow.
  core::Status Reserve(std::int64_t bytes, std::byte** memory);

 private:
  struct Block : GpuBlock {
    std::int64_t bytes = 0;
  };

  const cuda::Api& cuda_;
  Communicator& communicator_;
  std::vector<Block> blocks_;  // the last is the one in use
};

// Memory of the host that the device copies from and to while the host goes on. Kept as above.
class PinnedMemory {
 public:
  explicit PinnedMemory(const cuda::Api& cuda) : cuda_(cuda) {}
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  core::Status Reserve(std::int64_t bytes, void** memory);

 private:
  const cuda::Api& cuda_;
  std::vector<std::pair<void*, std::int64_t>> blocks_;
};

}  // namespace sirtaki::ops::nccl
