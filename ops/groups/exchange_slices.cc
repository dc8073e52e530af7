#include "ops/groups/exchange_slices.h"

#include <algorithm>

#include "ops/base/bytes.h"

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

void Slices::GiveParts(const void* input, void* output, std::int64_t bytes, std::int64_t self,
                       std::int64_t members) {
  const auto given = [&](std::int64_t m) {
    return static_cast<const std::byte*>(input) + m * bytes;
  };
  const auto taken = [&](std::int64_t m) { return static_cast<std::byte*>(output) + m * bytes; };
  Clear();
  // Each begins with the member behind it, so that not all send to the same one at first.
  for (std::int64_t i = 1; i < members; ++i) {
    const std::int64_t to = (self + i) % members;
    const std::int64_t from = (self - i + members) % members;
    Send(to, given(to), bytes);
    Receive(from, taken(from), bytes);
  }
  Copy(taken(self), given(self), bytes);
}

}  // namespace sirtaki::ops
