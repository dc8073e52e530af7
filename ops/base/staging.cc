#include "ops/base/staging.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace sirtaki::ops {

void* Staging::Reserve(std::int64_t bytes) {
  if (bytes > capacity_ || memory_ == nullptr) {
    // Powers of two: a buffer that goes around among groups of all sizes grows a few times only.
    constexpr std::uint64_t kSmallest = 4096;
    const auto size = static_cast<std::int64_t>(
        std::bit_ceil(std::max(static_cast<std::uint64_t>(bytes), kSmallest)));
    memory_.reset();
    capacity_ = 0;
    memory_ = source_.Allocate(size);
    capacity_ = size;
  }
  return memory_.get();
}

std::unique_ptr<Staging> StagingPool::Take() {
  if (free_.empty()) return std::make_unique<Staging>(source_);
  std::unique_ptr<Staging> staging = std::move(free_.back());
  free_.pop_back();
  return staging;
}

}  // namespace sirtaki::ops
