// The numbers of process sets: those that a session gives, and those of the sets that the library
// makes for itself beside one, far above.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/types.h"

namespace sirtaki::ops {

// A rank is in one set of each kind beside a set: its slice's.
enum class SetKind : std::uint8_t { kSession, kCarriers, kMeeting };

inline constexpr int kSetNumberBits = 30;
inline constexpr core::SetNumber kMaxSlices = 256;
// A session's sets from this number on have none beside them.
inline constexpr core::SetNumber kMaxSetWithSlices =
    (core::SetNumber{1} << kSetNumberBits) / kMaxSlices;

// Preconditions: set < kMaxSetWithSlices, slice < kMaxSlices.
constexpr core::SetNumber SetBeside(SetKind kind, core::SetNumber set, std::size_t slice) {
  return (static_cast<core::SetNumber>(kind) << kSetNumberBits) + set * kMaxSlices +
         static_cast<core::SetNumber>(slice);
}

// Differs between all sets that one rank is in, and stays small while there are few of them.
constexpr std::int64_t DenseSetNumber(core::SetNumber set) {
  const core::SetNumber kind = set >> kSetNumberBits;
  const core::SetNumber low = set & ((core::SetNumber{1} << kSetNumberBits) - 1);
  return std::int64_t{4} * (kind == 0 ? low : low / kMaxSlices) + kind;
}

}  // namespace sirtaki::ops
