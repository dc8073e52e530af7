// How the texts of a membership call workers. For the files that make it up only.
#pragma once

#include <string>

#include "launch/elastic/membership.h"

namespace sirtaki::launch {

inline std::string NameOf(WorkerId id, const std::string& host) {
  return "worker " + std::to_string(id) + " on host " + host;
}

inline std::string LastEndText(const std::string& last_end) {
  return last_end.empty() ? "" : "; the last that ended: " + last_end;
}

}  // namespace sirtaki::launch
