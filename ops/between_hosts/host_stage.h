// The members of a process set that are on one host share a stage to reduce together before
// anything crosses to other hosts: their chunks, and how far each of them has come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/types.h"
#include "ops/shm/region.h"
#include "ops/shm/shared_counter.h"

namespace sirtaki::ops {

// The counters stand at the beginning of a member's memory. Each counts chunks, of all operations
// of the set: a member goes through them in the same order as the others.
struct HostStageCounters {
  shm::SharedCounter loaded;   // it has given its elements
  shm::SharedCounter reduced;  // and has reduced its part of everyone's
  shm::SharedCounter crossed;  // its slice has come back from the other hosts
  shm::SharedCounter taken;    // it has taken what everyone's slices brought
  shm::SharedCounter bell;     // rung by the others whenever they come further
};

// HostStage is not thread-safe: it belongs to the large lane. The memory is the members'.
class HostStage {
 public:
  // Chunks under way at once: one crosses while the next is loaded and reduced. A divisor of 2^32,
  // so that places go round when the counters of chunks wrap.
  static constexpr std::uint32_t kSlots = 8;

  // MemoryBytes is the size of one member's memory.
  static std::int64_t MemoryBytes(std::int64_t chunk_bytes) {
    return core::RoundUp(kCountersBytes + 2 * std::int64_t{kSlots} * chunk_bytes, kPageBytes);
  }

  // `memory`: of each member, MemoryBytes, zeroed.
  HostStage(std::vector<std::shared_ptr<shm::Region>> memory, int self, std::int64_t chunk_bytes)
      : memory_(std::move(memory)), self_(self), chunk_(chunk_bytes) {}

  int size() const { return static_cast<int>(memory_.size()); }
  int self() const { return self_; }

  HostStageCounters& counters(int member) const {
    return *reinterpret_cast<HostStageCounters*>(Of(member));
  }
  // Where a member's elements of a chunk lie, and what is reduced of it for that member's slice.
  std::byte* Loaded(int member, std::uint32_t chunk) const {
    return Of(member) + kCountersBytes + chunk % kSlots * chunk_;
  }
  std::byte* Reduced(int member, std::uint32_t chunk) const {
    return Loaded(member, chunk) + kSlots * chunk_;
  }
  // Chunks of the operations that are over.
  std::uint32_t chunks() const { return chunks_; }
  void EndOperation(std::uint32_t chunks) { chunks_ += chunks; }

  // This member has come further: for its own counters.
  void Publish(shm::SharedCounter& counter, std::uint32_t value) {
    counter.Store(value);
    for (int member = 0; member < size(); ++member) {
      if (member != self_) counters(member).bell.Add(1);
    }
  }

  const std::shared_ptr<shm::Region>& memory() const {
    return memory_[static_cast<std::size_t>(self_)];
  }

 private:
  static constexpr std::int64_t kPageBytes = 64 << 10;  // a whole one, on every system
  static constexpr std::int64_t kCountersBytes = 4096;
  static_assert(sizeof(HostStageCounters) <= kCountersBytes);

  std::byte* Of(int member) const { return memory_[static_cast<std::size_t>(member)]->base(); }

  const std::vector<std::shared_ptr<shm::Region>> memory_;
  const int self_;
  const std::int64_t chunk_;
  std::uint32_t chunks_ = 0;
};

}  // namespace sirtaki::ops
