// The texts here say that ranks asked for different things under one key.
#pragma once

#include <string>
#include <vector>

#include "core/protocol/message.h"

namespace sirtaki::core {

// `all-reduce "layer1.weight": shape [3, 4] on ranks 0-2, shape [4, 3] on rank 3`. Names only what
// differs. Groups whose request is invalid come first, with their reason; otherwise the lowest rank
// does. Precondition: variants is not empty.
std::string MismatchText(const Key& key, const std::vector<Variant>& variants,
                         std::uint32_t more_variants);

// "rank 3", "ranks 0-2, 5".
std::string RanksText(const RankRanges& ranks);

// Where a decided failure began, as all members can tell it from what reaches them: the key's
// tensor, and the first rank that `text` blames (the one whose argument is wrong, the one that has
// left). A mismatch blames nobody: its rank is -1.
Origin FailOrigin(const Key& key, StatusCode code, const std::string& text);

}  // namespace sirtaki::core
