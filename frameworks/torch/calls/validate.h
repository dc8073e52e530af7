// What one rank can see to be wrong in a request, whatever the others ask for.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/base/rank_ranges.h"
#include "core/protocol/request.h"

namespace sirtaki::detail {

// What a signature does not tell of this rank's own tensor.
struct OwnTensor {
  int rank = -1;       // this one, of the world
  int dimensions = 1;  // as the caller passed it: rows of shape {} are of a number or of a vector
  std::int64_t rows = -1;  // its first dimension; -1: nothing that depends on it is looked at
  std::span<const std::int64_t> splits = {};  // of all-to-all and scatter; empty: none were given
};

// Why the signature of one tensor (or of a barrier) is wrong, as a text for
// its Request::invalid; empty if it is right.
std::string ValidateRequest(const core::Signature& signature, const core::RankRanges& members,
                            const OwnTensor& own);

}  // namespace sirtaki::detail
