#include "fusion/planner.h"

#include <bit>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace sirtaki::fusion {
namespace {

// The class of two tensors has to be equal for them to share a group. It refers to an item of the batch
// that is being planned.
struct GroupClass {
  const core::Signature* of;
  const core::RankRanges* silent;

  // Scales count by their bits, as in Signature's comparison.
  auto Fields() const {
    return std::tuple(of->kind, of->reduction, of->dtype, of->wire, of->device, of->slot, of->root,
                      std::bit_cast<std::uint64_t>(of->prescale),
                      std::bit_cast<std::uint64_t>(of->postscale));
  }
  bool operator==(const GroupClass& other) const {
    return (of == other.of || Fields() == other.Fields()) &&
           (silent == other.silent || *silent == *other.silent);
  }
};

struct GroupClassHash {
  std::size_t operator()(const GroupClass& c) const noexcept {
    std::uint64_t hash = 0;
    const auto mix = [&hash](std::uint64_t value) {
      hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 29;
    };
    const core::Signature& of = *c.of;
    mix(static_cast<std::uint64_t>(of.kind) << 32 | static_cast<std::uint64_t>(of.reduction) << 24 |
        static_cast<std::uint64_t>(of.dtype) << 16 | static_cast<std::uint64_t>(of.device));
    mix(static_cast<std::uint64_t>(of.slot) << 32 | static_cast<std::uint32_t>(of.root));
    if (of.wire) mix(static_cast<std::uint64_t>(*of.wire));
    mix(std::bit_cast<std::uint64_t>(of.prescale));
    mix(std::bit_cast<std::uint64_t>(of.postscale));
    for (const core::RankRange& range : c.silent->ranges()) {
      mix(static_cast<std::uint64_t>(range.first) << 32 | static_cast<std::uint32_t>(range.last));
    }
    return static_cast<std::size_t>(hash);
  }
};

// The group of each class that still takes tensors. Most often the next tensor is of the class of the
// last one, which is found without the table.
class OpenGroups {
 public:
  // The group's index, or none.
  std::optional<std::size_t> Find(const GroupClass& which) const {
    if (last_ && last_->first == which) return last_->second;
    const auto found = others_.find(which);
    return found == others_.end() ? std::nullopt : std::optional(found->second);
  }
  void Open(const GroupClass& which, std::size_t group) {
    if (last_ && last_->first != which) others_.insert_or_assign(last_->first, last_->second);
    last_.emplace(which, group);
  }

 private:
  // An entry that others_ has of the last one's class is older.
  std::optional<std::pair<GroupClass, std::size_t>> last_;
  std::unordered_map<GroupClass, std::size_t, GroupClassHash> others_;
};

// Nothing moves in a barrier, nor where an arena is made.
std::int64_t BytesOf(const core::Signature& signature) {
  const bool moves =
      signature.kind != core::OpKind::kBarrier && signature.kind != core::OpKind::kMakeArena;
  return moves ? signature.Bytes() : 0;
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

class Planning {
 public:
  Planning(const core::RunBatch& batch, bool deterministic)
      : batch_(batch), deterministic_(deterministic) {}

  std::vector<Group> Finish() {
    for (std::size_t i = 0; i < batch_.items.size(); ++i) {
      const core::RunItem& item = batch_.items[i];
      if (core::AllAbsent(item.absent)) continue;
      // The groups of a bucket must not depend on what else was ready.
      std::optional<OpenGroups> of_bucket;
      OpenGroups* open = deterministic_ ? nullptr : &open_;
      if (item.key.form == core::Key::Form::kBucket) open = &of_bucket.emplace();
      if (item.signature->parts.empty()) Add({i, 0}, open);
      for (std::size_t part = 0; part < item.signature->parts.size(); ++part) {
        if (item.absent.empty() || !item.absent[part]) Add({i, part}, open);
      }
    }
    for (Group& group : groups_) {
      const core::Signature& signature = SignatureAt(batch_, group.places.front());
      if (FitsSmallLane(signature, group.bytes, batch_.limits)) group.lane = Lane::kSmall;
    }
    return std::move(groups_);
  }

 private:
  // `open`: the groups that it may share; null: none.
  void Add(Place place, OpenGroups* open) {
    const core::Signature& signature = SignatureAt(batch_, place);
    const bool counted = core::FirstDimensionVaries(signature.kind);
    const std::int64_t bytes = counted ? 0 : BytesOf(signature);
    const std::int64_t limit = batch_.limits.fusion_bytes;
    if (signature.kind == core::OpKind::kMakeArena) open = nullptr;
    if (open != nullptr) {
      const GroupClass which{&signature, &batch_.items[place.item].silent};
      if (const std::optional<std::size_t> found = open->Find(which)) {
        Group& group = groups_[*found];
        const bool joins = counted ? group.places.size() < kGatherCount : Fits(group, bytes, limit);
        if (joins) {
          group.bytes += bytes;
          group.places.push_back(place);
          return;
        }
      }
      // A tensor above the limit is a group that takes no other, and leaves an open one open.
      if (counted || bytes <= limit) open->Open(which, groups_.size());
    }
    groups_.push_back({.lane = Lane::kLarge, .bytes = bytes, .places = {place}});
  }

  const core::RunBatch& batch_;
  const bool deterministic_;
  OpenGroups open_;
  std::vector<Group> groups_;
};

}  // namespace

const core::Signature& SignatureAt(const core::RunBatch& batch, Place place) {
  const core::Signature& signature = *batch.items[place.item].signature;
  return signature.parts.empty() ? signature : *signature.parts[place.part];
}

std::vector<Group> Plan(const core::RunBatch& batch, bool deterministic) {
  return Planning(batch, deterministic).Finish();
}

}  // namespace sirtaki::fusion
