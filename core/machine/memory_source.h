// Where memory comes from that a backend likes best: shared by the ranks of a host, registered with
// a device, or plain. A backend that can reduce memory where it lies has one of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace sirtaki::core {

// Thread-safe. The memory may outlive its source.
class MemorySource {
 public:
  static constexpr std::size_t kAlignment = 64;

  virtual ~MemorySource() = default;

  // The memory has at least `bytes`, is aligned to kAlignment and not cleared. It goes back when
  // the last reference goes. Throws std::bad_alloc.
  virtual std::shared_ptr<void> Allocate(std::int64_t bytes) = 0;

  // True if the memory, whoever allocated it, is as good as the source's own: nothing is gained by
  // moving to that what lies there.
  virtual bool Contains(const void* memory) const = 0;
};

// Plain memory comes from the heap.
MemorySource& PlainMemory();

}  // namespace sirtaki::core
