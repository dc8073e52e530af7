#include "ops/between_hosts/host_stage.h"

namespace sirtaki::ops {

std::int64_t HostStage::MemoryBytes(std::int64_t chunk_bytes) {
  const std::int64_t bytes = kCountersBytes + 2 * std::int64_t{kSlots} * chunk_bytes;
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

void HostStage::Publish(shm::SharedCounter& counter, std::uint32_t value) {
  counter.Store(value);
  for (int member = 0; member < size(); ++member) {
    if (member != self_) counters(member).bell.Add(1);
  }
}

}  // namespace sirtaki::ops
