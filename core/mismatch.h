// What to say when ranks asked for different things under one key.
#pragma once

#include <string>
#include <vector>

#include "core/message.h"

namespace sirtaki::core {

// `"layer1.weight": all-reduce: shape [3, 4] on ranks 0-2, shape [4, 3] on rank 3`. Names only what
// differs. Groups whose request is invalid come with their reason. Precondition: variants is not
// empty.
std::string MismatchText(const Key& key, const std::vector<Variant>& variants,
                         std::uint32_t more_variants);

// "rank 3", "ranks 0-2, 5".
std::string RanksText(const RankRanges& ranks);

}  // namespace sirtaki::core
