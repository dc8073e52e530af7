// Memory through which small tensors pass: aligned to a cache line, kept until its owner goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/machine/memory_source.h"

namespace sirtaki::ops {

// Staging is not thread-safe. The source must outlive it, but not its memory.
class Staging {
 public:
  static constexpr std::size_t kAlignment = core::MemorySource::kAlignment;

  explicit Staging(core::MemorySource& source = core::PlainMemory()) : source_(source) {}

  // Reserve gives at least `bytes`; what was there before is lost if it has to grow. Throws
  // std::bad_alloc.
  void* Reserve(std::int64_t bytes);
  std::int64_t capacity() const { return capacity_; }

 private:
  core::MemorySource& source_;
  std::shared_ptr<void> memory_;
  std::int64_t capacity_ = 0;
};

// Hands out stagings that are taken back and used again. Not thread-safe.
class StagingPool {
 public:
  explicit StagingPool(core::MemorySource& source = core::PlainMemory()) : source_(source) {}

  std::unique_ptr<Staging> Take();
  void Return(std::unique_ptr<Staging> staging) { free_.push_back(std::move(staging)); }

 private:
  core::MemorySource& source_;
  // The last was used last, and is likely in the cache.
  std::vector<std::unique_ptr<Staging>> free_;
};

}  // namespace sirtaki::ops
