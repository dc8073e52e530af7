#include "ops/nccl/device_memory.h"

#include <algorithm>
#include <string>

namespace sirtaki::ops::nccl {
namespace {

using core::Status;

constexpr std::int64_t kLeastBytes = std::int64_t{1} << 20;
// Above it a block is as large as it has to be.
constexpr std::int64_t kMostDoubled = std::int64_t{64} << 20;

std::size_t Size(std::int64_t bytes) { return static_cast<std::size_t>(bytes); }

}  // namespace

bool GpuBlock::TakeFromNccl(const Api& nccl, const cuda::Api& cuda, std::int64_t bytes) {
  if (nccl.MemAlloc == nullptr || nccl.MemFree == nullptr) return false;
  of_nccl = nccl.MemAlloc(&memory, Size(bytes)) == Result::kSuccess;
  if (!of_nccl) static_cast<void>(cuda.GetLastError());  // or somebody takes it for his own
  return of_nccl;
}

void GpuBlock::Free(const Api& nccl, const cuda::Api& cuda) const {
  if (of_nccl) {
    static_cast<void>(nccl.MemFree(memory));
  } else {
    static_cast<void>(cuda.Free(memory));
  }
}

DeviceMemory::~DeviceMemory() {
  for (const Block& block : blocks_) block.Free(communicator_.api(), cuda_);
}

Status DeviceMemory::Reserve(std::int64_t bytes, std::byte** memory) {
  const std::int64_t have = blocks_.empty() ? 0 : blocks_.back().bytes;
  if (bytes > have) {
    Block block;
    block.bytes = std::max({bytes, std::min(2 * have, kMostDoubled), kLeastBytes});
    if (!block.TakeFromNccl(communicator_.api(), cuda_, block.bytes)) {
      block.bytes = std::max(bytes, kLeastBytes);  // little is left
      Status status =
          cuda::Check(cuda_, cuda_.Malloc(&block.memory, Size(block.bytes)), "cudaMalloc");
      if (!status.ok()) {
        return {status.code(), status.message() + " (" + std::to_string(block.bytes) +
                                   " bytes of staging memory)"};
      }
    }
    blocks_.push_back(block);
  }
  *memory = blocks_.empty() ? nullptr : static_cast<std::byte*>(blocks_.back().memory);
  return Status::Ok();
}

PinnedMemory::~PinnedMemory() {
  for (const auto& [memory, bytes] : blocks_) static_cast<void>(cuda_.FreeHost(memory));
}

Status PinnedMemory::Reserve(std::int64_t bytes, void** memory) {
  if (blocks_.empty() || bytes > blocks_.back().second) {
    const std::int64_t taken =
        std::max<std::int64_t>({bytes, std::min(2 * bytes, kMostDoubled), 4096});
    void* block = nullptr;
    Status status = cuda::Check(cuda_, cuda_.HostAlloc(&block, Size(taken), 0), "cudaHostAlloc");
    if (!status.ok()) return status;
    blocks_.emplace_back(block, taken);
  }
  *memory = blocks_.back().first;
  return Status::Ok();
}

}  // namespace sirtaki::ops::nccl
