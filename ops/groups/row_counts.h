// Calls whose rows differ by rank check with these functions what the members have told.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/protocol/request.h"

namespace sirtaki::ops {

// The sum of `rows`, each not negative, times `row_bytes`; false if that is not so or does not fit.
bool TotalBytes(const std::vector<std::int64_t>& rows, std::int64_t row_bytes, std::int64_t* total);
// The text of that; and of an allocate_output that gives nothing.
std::string WrongRows(const core::Key& key, const std::vector<std::int64_t>& rows);
std::string NoMemoryFor(const core::Key& key);

}  // namespace sirtaki::ops
