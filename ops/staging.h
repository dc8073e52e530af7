// Memory through which small tensors pass: aligned to a cache line, kept until its owner goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace sirtaki::ops {

// Not thread-safe.
class Staging {
 public:
  static constexpr std::size_t kAlignment = 64;

  // At least `bytes`; what was there before is lost if it has to grow. Throws std::bad_alloc.
  void* Reserve(std::int64_t bytes);
  std::int64_t capacity() const { return capacity_; }

 private:
  struct Free {
    void operator()(void* memory) const {
      ::operator delete (memory, std::align_val_t{kAlignment});
    }
  };
  std::unique_ptr<void, Free> memory_;
  std::int64_t capacity_ = 0;
};

// Hands out stagings that are taken back and used again. Not thread-safe.
class StagingPool {
 public:
  std::unique_ptr<Staging> Take();
  void Return(std::unique_ptr<Staging> staging) { free_.push_back(std::move(staging)); }

 private:
  std::vector<std::unique_ptr<Staging>>
      free_;  // the last was used last, and is likely in the cache
};

}  // namespace sirtaki::ops
