#include "ops/nccl/pinned_blocks.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>
#include <vector>

#include "core/base/types.h"

namespace sirtaki::ops::nccl {
namespace {

using core::Status;

constexpr std::int64_t kLeastPinned = 4096;
// Up to it sizes are powers of two, so that few serve many; above it a block is as large as it is.
constexpr std::int64_t kMostRounded = std::int64_t{64} << 20;
// Kept for messages to come, where nobody has them.
constexpr std::int64_t kMostKept = std::int64_t{256} << 20;

std::int64_t SizeFor(std::int64_t bytes) {
  if (bytes > kMostRounded) return core::RoundUp(bytes, kLeastPinned);
  const auto least = static_cast<std::uint64_t>(std::max(bytes, kLeastPinned));
  return static_cast<std::int64_t>(std::bit_ceil(least));
}

}  // namespace

PinnedBlocks::PinnedBlocks(std::shared_ptr<cuda::Device> device)
    : shared_(std::make_shared<Shared>()) {
  shared_->device = std::move(device);
}

PinnedBlocks::~PinnedBlocks() {
  {
    core::MutexLock lock(shared_->mutex);
    shared_->closed = true;
  }
  shared_->Trim(0);
}

// Null: none. One that is twice as large would be missed by others.
std::byte* PinnedBlocks::Shared::FindFree(std::int64_t bytes, std::int64_t* size) {
  core::MutexLock lock(mutex);
  const auto found = free.lower_bound(bytes);
  if (found == free.end() || found->first >= 2 * bytes) return nullptr;
  std::byte* const memory = found->second;
  *size = found->first;
  free_bytes -= found->first;
  free.erase(found);
  return memory;
}

void PinnedBlocks::Shared::Trim(std::int64_t kept) {
  std::vector<std::byte*> surplus;
  {
    core::MutexLock lock(mutex);
    while (free_bytes > kept) {
      const auto largest = std::prev(free.end());
      surplus.push_back(largest->second);
      free_bytes -= largest->first;
      free.erase(largest);
    }
  }
  if (surplus.empty()) return;
  const cuda::Device::Scope scope(*device);
  for (std::byte* memory : surplus) static_cast<void>(device->api().FreeHost(memory));
}

void PinnedBlocks::Shared::Return(std::byte* memory, std::int64_t size) {
  {
    core::MutexLock lock(mutex);
    free.emplace(size, memory);
    free_bytes += size;
    if (!closed) return;
  }
  Trim(0);
}

Status PinnedBlocks::Take(std::int64_t bytes, std::shared_ptr<std::byte>* block) {
  std::int64_t size = SizeFor(bytes);
  std::byte* memory = shared_->FindFree(size, &size);
  if (memory == nullptr) {
    shared_->Trim(kMostKept);
    void* taken = nullptr;
    const cuda::Api& api = shared_->device->api();
    Status status =
        cuda::Check(api, api.HostAlloc(&taken, static_cast<std::size_t>(size), 0), "cudaHostAlloc");
    if (!status.ok()) {
      return {status.code(), status.message() + " (" + std::to_string(size) +
                                 " bytes of pinned memory for a message)"};
    }
    memory = static_cast<std::byte*>(taken);
  }
  *block = std::shared_ptr<std::byte>(
      memory, [shared = shared_, size](std::byte* gone) { shared->Return(gone, size); });
  return Status::Ok();
}

}  // namespace sirtaki::ops::nccl
