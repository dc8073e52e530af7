// The texts of a membership have these parts in common. For the files that make it up only.
#pragma once

#include <string>
#include <string_view>

#include "launch/elastic/membership.h"
#include "launch/reports/generations.h"

namespace sirtaki::launch {

// The end of a text that tells that nobody is left who has trained.
inline constexpr std::string_view kStartAgain =
    "; what was trained is lost: start the job again, and it goes on from the program's own "
    "checkpoint, if it has one";

// What is told of a worker behind its name.
inline constexpr std::string_view kDoesNotEnd =
    " was killed, and its host has not told of its end: look at that host";

inline std::string LastEndText(const std::string& last_end) {
  return last_end.empty() ? "" : "; the last that ended: " + last_end;
}

}  // namespace sirtaki::launch
