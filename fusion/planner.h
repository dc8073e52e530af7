// Agreed tensors -> groups that are moved together. Pure: the same batch gives the same plan on
// every rank, whatever a rank contributes (sizes that may differ by rank are never looked at).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/engine/executor.h"

namespace sirtaki::fusion {

enum class Lane : std::uint8_t { kSmall, kLarge };

// One group of a kind whose first dimension may differ by rank has at most so many tensors.
inline constexpr std::size_t kGatherCount = 64;

// A place in a batch: an item, and which of its parts, if it has any.
struct Place {
  std::size_t item = 0;
  std::size_t part = 0;
  bool operator==(const Place&) const = default;
};
const core::Signature& SignatureAt(const core::RunBatch& batch, Place place);

// A group has its places in the order of the batch.
struct Group {
  Lane lane = Lane::kSmall;
  // The bytes are those of all tensors, in their own type, as each rank gives them; 0 where the
  // first dimension may differ by rank, and of a barrier.
  std::int64_t bytes = 0;
  std::vector<Place> places;
};

// Tensors share a group if kind, reduction, dtype, wire type, device, root, factors and silent
// ranks are equal; a bucket shares its groups with nothing else. Order within the batch is otherwise
// free: groups come in the order of their first tensor. What no rank has is in no group: there is
// nothing to move. `deterministic`: what is in no bucket goes alone, since its group must not depend
// on what else was ready.
std::vector<Group> Plan(const core::RunBatch& batch, bool deterministic);

}  // namespace sirtaki::fusion
