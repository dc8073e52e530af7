// Where the files of a rank's timeline, flight record and metrics are, and how they get there.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "core/base/status.h"
#include "core/base/types.h"

namespace sirtaki::core::trace {

// The folder of flight records that are asked for by "auto".
inline constexpr std::string_view kRecordFolder = "sirtaki-records";

// The option timeline is a folder, in which each rank has a file, or a file of rank 0. Empty: this
// rank writes none.
std::string TimelinePath(const std::string& option, int rank);
// The option of one generation of an elastic job: each has a folder of its own in that of the option.
std::string TimelineOfGeneration(const std::string& option, int generation);
std::string FlightRecordPath(const std::string& folder, int rank);
// The rank's number before the ending: "out/metrics.csv" is "out/metrics.3.csv".
std::string MetricsPath(const std::string& option, int rank);
// The option of one generation likewise: lines of earlier ones stay. What is replaced whole stays where it is.
std::string MetricsOfGeneration(const std::string& option, int generation);
// Whether it is the text format of Prometheus.
bool IsPrometheus(std::string_view path);

// The end of a run waits this long for a file system that does not answer.
inline constexpr Duration kFilePatience = std::chrono::seconds(10);
// The status of a file that is left as it is after that. `what`: as "the timeline".
Status StuckFile(std::string_view what, const std::string& path, Duration patience);

// Makes the folders above a file. kBackend names the one that cannot be made.
Status MakeFoldersOf(const std::string& path);

// The file has this text, or, whatever happens, what it had before; its folders are made. kBackend
// if it cannot be written.
Status ReplaceFile(const std::string& path, std::string_view text);

// Moves a file that is there to the folder "previous" beside it, in place of one there. A file that
// is not there is none to move; kBackend if it is, and stays.
Status SetAside(const std::string& path);

}  // namespace sirtaki::core::trace
