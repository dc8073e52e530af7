// Where tensors lie that are reduced together in one piece of memory, side by side. Pure: the same
// on every rank.
#pragma once

#include <cstdint>
#include <vector>

namespace sirtaki::fusion {

// Bytes, of where each tensor begins: the widest load of a kernel.
inline constexpr std::int64_t kPackedAlignment = 16;

// Where tensors of so many bytes begin; the last is the end.
std::vector<std::int64_t> PackedStarts(const std::vector<std::int64_t>& tensors);

// Buckets in one arena, all in bytes.
struct ArenaLayout {
  std::vector<std::vector<std::int64_t>> starts;  // of each bucket's tensors
  std::int64_t bytes = 0;                         // of the whole: a multiple of what NCCL registers
};

// `buckets`: the bytes of each one's tensors.
ArenaLayout LayOutArena(const std::vector<std::vector<std::int64_t>>& buckets);

}  // namespace sirtaki::fusion
