#include "fusion/bucket_plan.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "core/protocol/wire.h"

namespace sirtaki::fusion {
namespace {

struct Open {
  std::vector<std::size_t> gradients;
  std::int64_t bytes = 0;
  std::int64_t limit = 0;
};

bool HasRoom(const Open& open, std::int64_t bytes) {
  if (open.gradients.size() >= core::kMaxParts) return false;
  return bytes <= open.limit - open.bytes || open.bytes < open.limit / 2;
}

}  // namespace

std::vector<std::vector<std::size_t>> PlanBuckets(const std::vector<core::Signature>& gradients,
                                                  const BucketSizes& sizes) {
  std::vector<std::vector<std::size_t>> buckets;
  std::map<std::tuple<core::DType, core::DeviceKind, std::uint32_t>, Open> open_of_kind;
  const auto close = [&buckets](Open& open) {
    if (!open.gradients.empty()) buckets.push_back(std::move(open.gradients));
    open = {};
  };
  std::int64_t limit = sizes.first;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const core::Signature& of = gradients[i];
    const std::int64_t bytes = of.Bytes();
    Open& open = open_of_kind[{of.dtype, of.device, of.slot}];
    if (!open.gradients.empty() && !HasRoom(open, bytes)) close(open);
    if (open.gradients.empty()) open.limit = std::exchange(limit, sizes.others);
    open.gradients.push_back(i);
    open.bytes += bytes;
    if (open.bytes >= open.limit) close(open);
  }
  for (auto& [kind, open] : open_of_kind) close(open);
  std::sort(buckets.begin(), buckets.end(),
            [](const auto& a, const auto& b) { return a.back() < b.back(); });
  return buckets;
}

}  // namespace sirtaki::fusion
