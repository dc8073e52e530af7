#include "fusion/arena_layout.h"

#include <utility>

#include "core/base/types.h"

namespace sirtaki::fusion {
namespace {

// A bucket begins at such a border, so that no two share a line of any cache; so does an arena's
// end: a page of NCCL's windows.
constexpr std::int64_t kBucketAlignment = 512;
constexpr std::int64_t kArenaAlignment = 4096;

}  // namespace

std::vector<std::int64_t> PackedStarts(const std::vector<std::int64_t>& tensors) {
  std::vector<std::int64_t> starts;
  starts.reserve(tensors.size() + 1);
  std::int64_t next = 0;
  for (const std::int64_t bytes : tensors) {
    next = core::RoundUp(next, kPackedAlignment);
    starts.push_back(next);
    next += bytes;
  }
  starts.push_back(next);
  return starts;
}

ArenaLayout LayOutArena(const std::vector<std::vector<std::int64_t>>& buckets) {
  ArenaLayout layout;
  for (const std::vector<std::int64_t>& tensors : buckets) {
    layout.bytes = core::RoundUp(layout.bytes, kBucketAlignment);
    std::vector<std::int64_t> starts = PackedStarts(tensors);
    for (std::int64_t& start : starts) start += layout.bytes;
    layout.bytes = starts.back();
    starts.pop_back();
    layout.starts.push_back(std::move(starts));
  }
  layout.bytes = core::RoundUp(layout.bytes, kArenaAlignment);
  return layout;
}

}  // namespace sirtaki::fusion
