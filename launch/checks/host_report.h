// A report tells of the host that sirtakirun runs on, when another host asks before a start.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/environment.h"

namespace sirtaki::launch {

// sirtakirun FLAG FOLDER LAUNCHER PROGRAM prints the report.
inline constexpr std::string_view kHostFlag = "--check-host";

struct HostReport {
  std::string version;               // of Sirtaki
  std::string launcher;              // what stands at its path, "Open MPI 4.1.4"; empty: none
  std::string program;               // why it cannot be started; empty: it can
  std::string library;               // which of ours it would load, "libsirtaki.so.0.1.0"
  std::string mpi;                   // which MPI, "libmpi.so.40.30.4"; empty: none
  std::vector<std::string> missing;  // libraries that it would not find
  bool operator==(const HostReport&) const = default;
};

// Looks: from this folder, as a rank would. Takes 20 s at most.
HostReport LookAtHost(const std::string& folder, const std::string& launcher,
                      const std::string& program, const core::EnvironmentView& env);

// Why the program cannot be started on this machine; empty if it can, as far as one sees. `*path`:
// where it is.
std::string FindProgram(const std::string& program, const core::EnvironmentView& env,
                        std::string* path);
// Guesses what somebody may have meant who named a program that cannot be started: "; did you mean
// ./u?" for a `u` that stands in the current folder. Empty if nothing is there.
std::string MeantProgram(const std::string& program);

// The report as lines, and back: lines of others, as a login may print them, are passed over. None
// if no report is there. Pure.
std::string ReportText(const HostReport& report);
std::optional<HostReport> ReadReport(std::string_view text);

// Ldd prints of a program the paths of our library and of MPI's, and what is not found.
// Pure.
struct LoadedLibraries {
  std::string ours;
  std::string mpi;
  std::vector<std::string> missing;
  std::string error;  // why it cannot be loaded for another reason
  bool operator==(const LoadedLibraries&) const = default;
};
LoadedLibraries ReadLdd(std::string_view text);
// The path of the first library whose name begins so; empty if it has none.
std::string PathIn(std::string_view text, std::string_view name);

}  // namespace sirtaki::launch
