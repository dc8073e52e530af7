#include "ops/shm/pool.h"

#include <algorithm>
#include <utility>

namespace sirtaki::ops::shm {

namespace {

constexpr std::int64_t kGranule = 4096;

}  // namespace

core::Status Pool::Make(std::int64_t bytes, std::shared_ptr<Pool>* pool) {
  std::shared_ptr<Region> region;
  core::Status status = Region::Create("sirtaki pool", bytes, &region);
  if (status.ok()) pool->reset(new Pool(std::move(region)));
  return status;
}

void* Pool::TryAllocate(std::int64_t bytes) {
  const std::int64_t size = (std::max<std::int64_t>(bytes, 1) + kGranule - 1) / kGranule * kGranule;
  core::MutexLock lock(mutex_);
  const auto fits = free_.lower_bound(size);
  if (fits != free_.end() && fits->first <= size + size / 8) {
    void* const block = fits->second;
    free_.erase(fits);
    return block;
  }
  if (size > region_->size() - end_) return nullptr;
  void* const block = region_->base() + end_;
  end_ += size;
  sizes_.emplace(block, size);
  return block;
}

void Pool::Free(void* block) {
  core::MutexLock lock(mutex_);
  free_.emplace(sizes_.at(block), block);
}

std::shared_ptr<void> Pool::Allocate(std::int64_t bytes) {
  void* const block = TryAllocate(bytes);
  if (block == nullptr) return core::PlainMemory().Allocate(bytes);
  return {block, [self = shared_from_this()](void* memory) { self->Free(memory); }};
}

}  // namespace sirtaki::ops::shm
