// Says in words what the flight records of a job tell: who waits in what, for whom, and what those
// did last. Pure.
#pragma once

#include <string>
#include <vector>

#include "core/trace/flight_record.h"

namespace sirtaki::launch {

// A few lines, the most telling first, for a terminal: whatever the records hold, it has no control
// characters but ends of lines. `records`: of one session, any of its ranks, in any order; not
// empty.
std::string Explain(std::vector<core::trace::FlightRecord> records);

}  // namespace sirtaki::launch
