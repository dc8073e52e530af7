// What one rank can see to be wrong in a request, whatever the others ask for.
#pragma once

#include <string>

#include "core/rank_ranges.h"
#include "core/request.h"

namespace sirtaki::ops {

// Why the signature is wrong, as a text for its Request::invalid; empty if it is right.
// `dimensions`: of the tensor as the caller passed it (a signature of an all-gather does not tell a
// number from a vector).
std::string ValidateRequest(const core::Signature& signature, const core::RankRanges& members,
                            int dimensions);

}  // namespace sirtaki::ops
