#include "ops/shm/pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <utility>

#include "core/base/check.h"
#include "ops/shm/pool_fork.h"

namespace sirtaki::ops::shm {

using core::Status;
using core::StatusCode;

namespace {

// Up to 8 pages each number has a class of its own; from there on a power of two has eight.
struct SizeClass {
  int number;
  std::int64_t pages;
};

SizeClass ClassOf(std::int64_t bytes) {
  const std::int64_t pages = (std::max<std::int64_t>(bytes, 1) + kPage - 1) / kPage;
  if (pages <= 8) return {static_cast<int>(pages), pages};
  const int doubling = std::bit_width(static_cast<std::uint64_t>(pages - 1)) - 4;
  const std::int64_t step = std::int64_t{1} << doubling;
  const std::int64_t steps = (pages + step - 1) / step;  // 9 to 16
  return {doubling * 8 + static_cast<int>(steps), steps * step};
}

}  // namespace

std::int64_t Pool::SizeOfBlock(std::int64_t bytes) { return ClassOf(bytes).pages * kPage; }

std::int64_t Pool::BytesOfClass(int number) {
  if (number <= 8) return number * kPage;
  const int doubling = (number - 9) / 8;
  return (std::int64_t{number - doubling * 8} << doubling) * kPage;
}

void Pool::FreeArray::operator()(std::uint16_t* array) const { std::free(array); }

Status Pool::Make(const PoolOptions& options, std::shared_ptr<Pool>* pool) {
  PoolOptions made = options;
  // Blocks of a few sizes that come and go leave gaps: addresses are cheap.
  if (made.address_bytes == 0) made.address_bytes = 4 * made.bytes;
  made.address_bytes = std::max(made.address_bytes / kPage, std::int64_t{1}) * kPage;
  std::shared_ptr<Region> region;
  Status status = made.shared ? Region::Create("sirtaki pool", made.address_bytes, &region)
                              : Region::CreatePrivate(made.address_bytes, &region);
  if (!status.ok()) return status;
  // Zeroed pages of the system's, taken as they are written.
  auto* blocks = static_cast<std::uint16_t*>(
      std::calloc(static_cast<std::size_t>(made.address_bytes / kPage), sizeof(std::uint16_t)));
  if (blocks == nullptr) return {StatusCode::kUnsupported, "no memory for the pool's table"};
  pool->reset(new Pool(made, std::move(region), blocks));
  return status;
}

Pool::Pool(const PoolOptions& options, std::shared_ptr<Region> region, std::uint16_t* blocks)
    : options_(options),
      region_(std::move(region)),
      ranges_(options.address_bytes),
      blocks_(blocks),
      window_end_(options.now() + kWindow) {
  use_.limit_bytes = options.bytes;
  AddToFork(*this);
}

Pool::~Pool() { RemoveFromFork(*this); }

void* Pool::TryAllocate(std::int64_t bytes) {
  const auto [number, pages] = ClassOf(std::min(bytes, options_.address_bytes + 1));
  core::MutexLock lock(mutex_);
  void* const block = TakeBlock(number, pages * kPage);
  ++(block != nullptr ? use_.allocations : use_.refusals);
  return block;
}

void* Pool::TakeBlock(int number, std::int64_t size) {
  if (in_child_) return nullptr;
  std::int64_t offset = -1;
  std::deque<Kept>& kept = kept_[static_cast<std::size_t>(number)];
  if (!kept.empty()) {
    offset = kept.back().offset;
    kept.pop_back();
    use_.cached_bytes -= size;
  } else {
    if (use_.in_use_bytes + size > use_.limit_bytes) return nullptr;
    while (use_.in_use_bytes + use_.cached_bytes + size > use_.limit_bytes && ReturnOldest()) {
    }
    while ((offset = ranges_.Take(size)) < 0 && ReturnOldest()) {
    }
    if (offset < 0) return nullptr;
    end_ = std::max(end_, offset + size);
  }
  blocks_[static_cast<std::size_t>(offset / kPage)] = static_cast<std::uint16_t>(number) | kInUse;
  use_.in_use_bytes += size;
  use_.peak_bytes = std::max(use_.peak_bytes, use_.in_use_bytes);
  peak_ = std::max(peak_, use_.in_use_bytes);
  return region_->base() + offset;
}

void Pool::Free(void* block) {
  const std::int64_t offset = OffsetOf(block);
  core::MutexLock lock(mutex_);
  std::uint16_t& state = blocks_[static_cast<std::size_t>(offset / kPage)];
  SIRTAKI_CHECK((state & kInUse) != 0 && offset % kPage == 0, "not a block of the pool in use");
  state &= static_cast<std::uint16_t>(~kInUse);
  const std::int64_t size = BytesOfClass(state);
  use_.in_use_bytes -= size;
  if (in_child_) {
    // Memory of the child's own by now, which it does not use again.
    state = 0;
    static_cast<void>(madvise(block, static_cast<std::size_t>(size), MADV_DONTNEED));
    return;
  }
  kept_[state].push_back({offset, ++freed_});
  use_.cached_bytes += size;
  if (freed_ % 64 == 0) NoteTime();
  for (const std::int64_t most = MayKeep(); use_.cached_bytes > most && ReturnOldest();) {
  }
}

std::shared_ptr<void> Pool::Allocate(std::int64_t bytes) {
  void* const block = TryAllocate(bytes);
  if (block == nullptr) return core::PlainMemory().Allocate(bytes);
  return {block, [self = shared_from_this()](void* memory) { self->Free(memory); }};
}

void Pool::SetLimit(std::int64_t bytes) {
  core::MutexLock lock(mutex_);
  if (in_child_) return;
  use_.limit_bytes = std::min(bytes, options_.address_bytes);
  while (use_.in_use_bytes + use_.cached_bytes > use_.limit_bytes && ReturnOldest()) {
  }
}

void Pool::Trim(std::int64_t keep_bytes) {
  core::MutexLock lock(mutex_);
  if (in_child_) return;
  NoteTime();
  while (use_.cached_bytes > keep_bytes && ReturnOldest()) {
  }
}

PoolUse Pool::Use() const {
  core::MutexLock lock(mutex_);
  return use_;
}

// What is kept is, with what is in use, no more than half of all: the rest of the program needs
// memory, too, and what is kept would not go when the system has none left.
std::int64_t Pool::MayKeep() {
  const std::int64_t peak = std::max(peak_, last_peak_);
  const std::int64_t half = use_.limit_bytes / 2 - use_.in_use_bytes;
  return std::max(options_.keep_bytes, std::min(peak, half));
}

void Pool::NoteTime() {
  const core::TimePoint now = options_.now();
  if (now < window_end_) return;
  last_peak_ = now < window_end_ + kWindow ? peak_ : use_.in_use_bytes;
  peak_ = use_.in_use_bytes;
  window_end_ = now + kWindow;
}

bool Pool::ReturnOldest() {
  std::deque<Kept>* oldest = nullptr;
  for (std::deque<Kept>& kept : kept_) {
    if (kept.empty()) continue;
    if (oldest == nullptr || kept.front().freed < oldest->front().freed) oldest = &kept;
  }
  if (oldest == nullptr) return false;
  const std::int64_t offset = oldest->front().offset;
  const std::int64_t size = BytesOfClass(static_cast<int>(oldest - kept_.data()));
  oldest->pop_front();
  blocks_[static_cast<std::size_t>(offset / kPage)] = 0;
  use_.cached_bytes -= size;
  // The pages go before anyone may have them again. Others wait: it is rare where steps repeat.
  region_->Discard(offset, size);
  use_.returned_bytes += size;
  ranges_.Give(offset, size);
  return true;
}

}  // namespace sirtaki::ops::shm
