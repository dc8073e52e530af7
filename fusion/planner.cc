#include "fusion/planner.h"

#include <bit>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <unordered_map>
#include <utility>

namespace sirtaki::fusion {
namespace {

// What has to be equal for two items to share a group.
struct GroupClass {
  core::OpKind kind;
  core::ReduceOp reduction;
  core::DType dtype;
  std::optional<core::DType> wire;
  core::DeviceKind device;
  std::uint32_t slot;
  std::int32_t root;
  std::uint64_t prescale;  // bits, as in Signature's comparison
  std::uint64_t postscale;
  const core::RankRanges* silent;  // of an item of the batch that is being planned
  // A bucket is grouped already: what shares its groups must not depend on what else was ready.
  bool in_bucket;
  std::uint64_t arena;
  std::uint64_t bucket;

  bool operator==(const GroupClass& other) const {
    return kind == other.kind && reduction == other.reduction && dtype == other.dtype &&
           wire == other.wire && device == other.device && slot == other.slot &&
           root == other.root && prescale == other.prescale && postscale == other.postscale &&
           *silent == *other.silent && in_bucket == other.in_bucket && arena == other.arena &&
           bucket == other.bucket;
  }
};

struct GroupClassHash {
  std::size_t operator()(const GroupClass& c) const noexcept {
    std::uint64_t hash = 0;
    const auto mix = [&hash](std::uint64_t value) {
      hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 29;
    };
    mix(static_cast<std::uint64_t>(c.kind) << 32 | static_cast<std::uint64_t>(c.reduction) << 24 |
        static_cast<std::uint64_t>(c.dtype) << 16 | static_cast<std::uint64_t>(c.device));
    mix(static_cast<std::uint64_t>(c.slot) << 32 | static_cast<std::uint32_t>(c.root));
    if (c.wire) mix(static_cast<std::uint64_t>(*c.wire));
    mix(c.prescale);
    mix(c.postscale);
    if (c.in_bucket) {
      mix(c.arena);
      mix(c.bucket);
    }
    for (const core::RankRange& range : c.silent->ranges()) {
      mix(static_cast<std::uint64_t>(range.first) << 32 | static_cast<std::uint32_t>(range.last));
    }
    return static_cast<std::size_t>(hash);
  }
};

GroupClass ClassOf(const core::RunItem& item) {
  const core::Signature& s = *item.signature;
  const bool in_bucket = item.key.form == core::Key::Form::kBucket;
  return {s.kind,
          s.reduction,
          s.dtype,
          s.wire,
          s.device,
          s.slot,
          s.root,
          std::bit_cast<std::uint64_t>(s.prescale),
          std::bit_cast<std::uint64_t>(s.postscale),
          &item.silent,
          in_bucket,
          in_bucket ? item.key.number : 0,
          item.key.bucket};
}

// Saturates: a plan of absurd shapes is a plan all the same.
std::int64_t TimesOrMax(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max()
                                                : product;
}

// Nothing moves in a barrier, nor where an arena is made.
std::int64_t BytesOf(const core::Signature& signature) {
  if (signature.kind == core::OpKind::kBarrier || signature.kind == core::OpKind::kMakeArena) {
    return 0;
  }
  return TimesOrMax(signature.ElementCount(),
                    static_cast<std::int64_t>(core::SizeOf(signature.dtype)));
}

// The small lane has several groups under way, whose operations must begin in the same order on all
// ranks: so each of its groups is one operation, of a size that all know.
bool FitsSmallLane(const core::Signature& signature, std::int64_t bytes,
                   const core::Limits& limits) {
  if (core::FirstDimensionVaries(signature.kind)) return false;
  if (signature.reduction == core::ReduceOp::kAdasum) return false;
  // Every rank gets what all give.
  if (signature.kind == core::OpKind::kAllGatherInto) return bytes <= limits.small_bytes / 16;
  return bytes <= limits.small_bytes;
}

bool Fits(const Group& group, std::int64_t bytes, std::int64_t limit) {
  return group.bytes <= limit && bytes <= limit - group.bytes;
}

}  // namespace

std::vector<Group> Plan(const core::RunBatch& batch, const Rules& rules) {
  const core::Limits& limits = batch.limits;
  std::vector<Group> groups;
  // The group of each class that still takes tensors.
  std::unordered_map<GroupClass, std::size_t, GroupClassHash> open;
  for (std::size_t i = 0; i < batch.items.size(); ++i) {
    const core::RunItem& item = batch.items[i];
    if (item.absent_everywhere) continue;
    const core::Signature& signature = *item.signature;
    const bool counted = core::FirstDimensionVaries(signature.kind);
    const std::int64_t bytes = counted ? 0 : BytesOf(signature);

    const auto found = open.find(ClassOf(item));
    if (found != open.end()) {
      Group& group = groups[found->second];
      const bool joins = counted
                             ? static_cast<std::int64_t>(group.items.size()) < rules.gather_count
                             : Fits(group, bytes, limits.fusion_bytes);
      if (joins) {
        group.bytes += bytes;
        group.items.push_back(i);
        continue;
      }
    }
    // A tensor above the limit is a group that takes no other, and leaves an open one open.
    const bool alone = signature.kind == core::OpKind::kMakeArena ||
                       (rules.deterministic && item.key.form != core::Key::Form::kBucket);
    if (!alone && (counted || bytes <= limits.fusion_bytes))
      open.insert_or_assign(ClassOf(item), groups.size());
    groups.push_back({.lane = Lane::kLarge, .bytes = bytes, .items = {i}});
  }

  for (Group& group : groups) {
    const core::Signature& signature = *batch.items[group.items.front()].signature;
    if (FitsSmallLane(signature, group.bytes, limits)) group.lane = Lane::kSmall;
  }
  return groups;
}

}  // namespace sirtaki::fusion
