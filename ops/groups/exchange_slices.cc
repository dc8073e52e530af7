#include "ops/groups/exchange_slices.h"

#include <algorithm>

namespace sirtaki::ops {

std::int64_t WindowBytes(std::int64_t chunk_bytes, std::int64_t members) {
  constexpr std::int64_t kWorthAMessage = std::int64_t{32} << 10;
  return std::min(chunk_bytes, std::max(chunk_bytes / members, kWorthAMessage));
}

void Slices::Clear() {
  outgoing_.clear();
  incoming_.clear();
}

void Slices::Send(std::int64_t member, const void* memory, std::int64_t bytes) {
  if (bytes > 0) outgoing_.push_back({static_cast<int>(member), memory, bytes});
}

void Slices::Receive(std::int64_t member, void* memory, std::int64_t bytes) {
  if (bytes > 0) incoming_.push_back({static_cast<int>(member), memory, bytes});
}

}  // namespace sirtaki::ops
