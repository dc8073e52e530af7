// One rank can see these faults of a call, whatever the others ask for.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/base/rank_ranges.h"
#include "core/protocol/request.h"

namespace sirtaki::detail {

// This rank's own tensor, as far as its signature does not tell of it.
struct OwnTensor {
  int rank = -1;       // this one, of the world
  int dimensions = 1;  // as the caller passed it: rows of shape {} are of a number or of a vector
  std::int64_t rows = 0;                      // its first dimension; 0 as well if it has none
  std::span<const std::int64_t> splits = {};  // of all-to-all and scatter; empty: none were given
};

// Returns why the signature of one tensor is wrong, as a text for its Request::invalid; empty if it is
// right. FillIn makes signatures that say only what their kind has: no root, factor, wire type or
// splits of another.
std::string ValidateRequest(const core::Signature& signature, const core::RankRanges& members,
                            const OwnTensor& own);

// The part of ValidateRequest that tells whether the signature's reduction is defined for its type.
std::string ValidateReduction(const core::Signature& signature);

}  // namespace sirtaki::detail
