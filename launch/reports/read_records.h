// The flight records that the ranks of a job have left in a folder.
#pragma once

#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/trace/flight_record.h"

namespace sirtaki::launch {

// Those of the files "flight-<number>.json", by number. Of several runs in the folder the last one
// counts; `notes` says, a line each, which files were left out, and why. kInvalidArgument if there
// is none that can be read.
core::Status ReadRecords(const std::string& folder, std::vector<core::trace::FlightRecord>* records,
                         std::vector<std::string>* notes);

}  // namespace sirtaki::launch
