// The flight records of a session tell which operations have begun and not ended, and how many
// wait for their turn. Pure.
#pragma once

#include <cstdint>
#include <string>

#include "launch/reports/explain_waits.h"

namespace sirtaki::launch {

// "the world", "process set 3"
std::string SetText(std::uint32_t set);

// A few lines; empty if nothing is under way.
std::string RunningText(const Records& records);

}  // namespace sirtaki::launch
