// The memory of a process that the other ranks of its host see: gradients, arenas and staging
// memory are taken from it, so that peers reduce them where they lie.
//
// One for the life of the process, whatever sessions come and go: tensors may outlive them. Blocks
// that are freed are kept for the next request of about their size, since fresh pages cost more
// than what is done with them.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "core/memory_source.h"
#include "core/status.h"
#include "core/thread_annotations.h"
#include "ops/shm/region.h"

namespace sirtaki::ops::shm {

// Thread-safe.
class Pool final : public core::MemorySource, public std::enable_shared_from_this<Pool> {
 public:
  // `bytes`: how much it may hand out at a time. Errors: kUnsupported.
  static core::Status Make(std::int64_t bytes, std::shared_ptr<Pool>* pool);

  // What a request of `bytes` takes; null if the pool is used up. Aligned to kAlignment.
  void* TryAllocate(std::int64_t bytes) SIRTAKI_EXCLUDES(mutex_);
  void Free(void* block) SIRTAKI_EXCLUDES(mutex_);

  // From the heap if the pool is used up.
  std::shared_ptr<void> Allocate(std::int64_t bytes) override;

  bool Contains(const void* memory) const override { return region_->Contains(memory); }
  // Precondition: Contains(memory).
  std::int64_t OffsetOf(const void* memory) const {
    return static_cast<const std::byte*>(memory) - region_->base();
  }
  const Region& region() const { return *region_; }

 private:
  explicit Pool(std::shared_ptr<Region> region) : region_(std::move(region)) {}

  const std::shared_ptr<Region> region_;
  core::Mutex mutex_;
  std::int64_t end_ SIRTAKI_GUARDED_BY(mutex_) = 0;  // nothing was taken from here on
  std::multimap<std::int64_t, void*> free_ SIRTAKI_GUARDED_BY(mutex_);  // by size
  std::unordered_map<void*, std::int64_t> sizes_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::ops::shm
