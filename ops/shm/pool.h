// Memory that is kept for the next request of about its size when it is freed, since fresh pages
// cost more than what is done with them. Shared: the other ranks of the host see it, so that
// gradients, arenas and staging memory are reduced where they lie.
//
// Blocks are whole pages, of eight sizes to each power of two. The one freed last is given out
// first: it is in the cache. What is kept beyond the most that was lately in use goes back to the
// system, oldest first, and its addresses are free for blocks of any size.
//
// A forked child sees the blocks that were in use as they were at the fork, as memory of its own.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/base/types.h"
#include "core/machine/memory_source.h"
#include "ops/shm/address_ranges.h"
#include "ops/shm/pool_fork.h"
#include "ops/shm/region.h"

namespace sirtaki::ops::shm {

inline constexpr std::int64_t kPage = 4096;

struct PoolOptions {
  std::int64_t bytes = 0;          // the most it holds, in use and kept, until SetLimit
  std::int64_t address_bytes = 0;  // over which blocks may be scattered; 0: enough for `bytes`
  bool shared = true;              // false: for this process alone
  std::int64_t keep_bytes = std::int64_t{64} << 20;  // may be kept in any case
  std::function<core::TimePoint()> now = [] { return core::Clock::now(); };
};

struct PoolUse {
  std::int64_t in_use_bytes = 0;  // in whole blocks, as all of these
  std::int64_t cached_bytes = 0;  // kept for the next request
  std::int64_t peak_bytes = 0;    // the most that was in use
  std::int64_t limit_bytes = 0;
  std::int64_t returned_bytes = 0;  // given back to the system so far
  std::int64_t allocations = 0;
  std::int64_t refusals = 0;  // requests that found no room
};

// Thread-safe. May be called while the process exits, if it is still there.
class Pool final : public core::MemorySource,
                   public std::enable_shared_from_this<Pool>,
                   private KeptApart {
 public:
  // Memory that was in use within this time, or the one before, counts as lately.
  static constexpr std::chrono::seconds kWindow{10};

  // Errors: kUnsupported, with what the system said.
  static core::Status Make(const PoolOptions& options, std::shared_ptr<Pool>* pool);
  // A request of `bytes` takes a block of this size: at most an eighth more, or up to the next page.
  static std::int64_t SizeOfBlock(std::int64_t bytes);

  // Aligned to a page, with whatever is in it. Null if the pool is used up, and in a forked child
  // of a shared pool's process.
  void* TryAllocate(std::int64_t bytes) SIRTAKI_EXCLUDES(mutex_);
  void Free(void* block) SIRTAKI_EXCLUDES(mutex_);

  // The memory comes from the heap if the pool is used up.
  std::shared_ptr<void> Allocate(std::int64_t bytes) override;

  // The most that new memory may make it from now on, as far as its addresses go. What is in use or
  // kept stays.
  void SetLimit(std::int64_t bytes) SIRTAKI_EXCLUDES(mutex_);
  // Gives back what is kept beyond `keep_bytes`.
  void Trim(std::int64_t keep_bytes) SIRTAKI_EXCLUDES(mutex_);
  PoolUse Use() const SIRTAKI_EXCLUDES(mutex_);

  bool Contains(const void* memory) const override { return region_->Contains(memory); }
  // Precondition: Contains(memory).
  std::int64_t OffsetOf(const void* memory) const {
    return static_cast<const std::byte*>(memory) - region_->base();
  }
  const Region& region() const { return *region_; }

  ~Pool() override;

 private:
  static std::int64_t BytesOfClass(int number);

  static constexpr int kClasses = 8 * 48;
  static constexpr std::uint16_t kInUse = 1U << 15;
  struct Kept {
    std::int64_t offset;
    std::uint64_t freed;  // ascending
  };
  struct FreeArray {
    void operator()(std::uint16_t* array) const;
  };

  Pool(const PoolOptions& options, std::shared_ptr<Region> region, std::uint16_t* blocks);

  void* TakeBlock(int size_class, std::int64_t size) SIRTAKI_REQUIRES(mutex_);
  std::int64_t MayKeep() SIRTAKI_REQUIRES(mutex_);
  void NoteTime() SIRTAKI_REQUIRES(mutex_);
  // Gives the block back that was freed first. False if none is kept.
  bool ReturnOldest() SIRTAKI_REQUIRES(mutex_);

  // ---- pool_fork.cc ----
  void BeforeFork() override;
  void AfterForkInParent() override;
  void AfterForkInChild() override;

  const PoolOptions options_;
  const std::shared_ptr<Region> region_;

  mutable core::Mutex mutex_;
  bool in_child_ SIRTAKI_GUARDED_BY(mutex_) = false;  // and the memory was shared
  AddressRanges ranges_ SIRTAKI_GUARDED_BY(mutex_);
  std::int64_t end_ SIRTAKI_GUARDED_BY(mutex_) = 0;  // no block has ever gone beyond
  // Each page has the size class of the block that begins there, and whether it is in use; 0: none
  // does.
  const std::unique_ptr<std::uint16_t[], FreeArray> blocks_;
  std::array<std::deque<Kept>, kClasses> kept_ SIRTAKI_GUARDED_BY(mutex_);  // back: freed last
  std::uint64_t freed_ SIRTAKI_GUARDED_BY(mutex_) = 0;
  PoolUse use_ SIRTAKI_GUARDED_BY(mutex_);
  // The most in use within this window and the one before.
  std::int64_t peak_ SIRTAKI_GUARDED_BY(mutex_) = 0;
  std::int64_t last_peak_ SIRTAKI_GUARDED_BY(mutex_) = 0;
  core::TimePoint window_end_ SIRTAKI_GUARDED_BY(mutex_);
  std::byte* snapshot_ SIRTAKI_GUARDED_BY(mutex_) = nullptr;  // while a fork is under way
};

}  // namespace sirtaki::ops::shm
