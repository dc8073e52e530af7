// Files of ranks, by the numbers in their names.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "core/base/status.h"

namespace sirtaki::launch {

// The paths of the files "<prefix><number>.json" in a folder. kInvalidArgument if there are none.
core::Status FindNumbered(const std::string& folder, std::string_view prefix,
                          std::map<int, std::string>* paths);

}  // namespace sirtaki::launch
