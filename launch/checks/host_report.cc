#include "launch/checks/host_report.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/base/text.h"
#include "launch/base/build_facts.h"
#include "launch/base/run_commands.h"
#include "launch/base/shell_text.h"
#include "launch/plan/find_launcher.h"

namespace sirtaki::launch {

using core::Quoted;

namespace {

constexpr std::string_view kLine = "sirtakirun-host ";
// The arrow is that of ldd: "libsirtaki.so.0.1 => /opt/lib/libsirtaki.so.0.1 (0x…)", "libx.so =>
// not found".
constexpr std::string_view kArrow = " => ";
constexpr std::string_view kMissing = " => not found";
// The fields of a report that have one value.
constexpr std::array<std::pair<std::string_view, std::string HostReport::*>, 5> kFields = {
    {{"version", &HostReport::version},
     {"launcher", &HostReport::launcher},
     {"program", &HostReport::program},
     {"library", &HostReport::library},
     {"mpi", &HostReport::mpi}}};
constexpr auto kLddPatience = std::chrono::seconds(10);

// The name of the file that the path leads to; empty if there is none.
std::string FileBehind(const std::string& path) {
  std::error_code error;
  return std::filesystem::canonical(path, error).filename().string();
}

}  // namespace

std::string FindProgram(const std::string& program, const core::EnvironmentView& env,
                        std::string* path) {
  if (program.find('/') == std::string::npos) {
    *path = FindOnPath(program, env);
    return path->empty() ? "is not on PATH" : "";
  }
  *path = program;
  struct stat info {};
  if (stat(program.c_str(), &info) != 0) return std::strerror(errno);
  if (S_ISDIR(info.st_mode)) return "is a folder";
  return access(program.c_str(), X_OK) == 0 ? "" : std::strerror(errno);
}

std::string MeantProgram(const std::string& program) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(program, error)) return "";
  const bool may_start = access(program.c_str(), X_OK) == 0;
  if (program.find('/') == std::string::npos && may_start)
    return "; did you mean ./" + program + "?";
  if (program.ends_with(".py")) return "; did you mean python3 " + program + "?";
  return may_start ? "" : "; chmod +x makes it a program";
}

HostReport LookAtHost(const std::string& folder, const std::string& launcher,
                      const std::string& program, const core::EnvironmentView& env) {
  HostReport report;
  report.version = FactsOfBuild().version;
  // A program that is named by its whole path may run without the folder all the same.
  const bool there = chdir(folder.c_str()) == 0;
  const std::string why = there ? "" : std::strerror(errno);
  if (const auto found = AskLauncher(launcher)) report.launcher = found->ShortName();
  std::string path;
  report.program = FindProgram(program, env, &path);
  if (!report.program.empty() && !there && !program.starts_with('/')) {
    report.program = "folder " + Quoted(folder) + ": " + why;
  }
  if (!report.program.empty()) return report;
  int signal = 0;
  const CommandOutcome outcome =
      RunCommands({{{"ldd", path}, {}, {}}}, kLddPatience, 1, &signal).front();
  if (signal != 0) raise(signal);  // whoever waits for the report is to hear of it
  LoadedLibraries libraries = ReadLdd(outcome.output + outcome.error);
  report.program = libraries.error;
  report.library = FileBehind(libraries.ours);
  report.mpi = FileBehind(libraries.mpi);
  report.missing = std::move(libraries.missing);
  return report;
}

std::string ReportText(const HostReport& report) {
  std::string text;
  const auto add = [&text](std::string_view name, const std::string& value) {
    text.append(kLine).append(name).append(" ").append(core::Escaped(value)).append("\n");
  };
  for (const auto& [name, field] : kFields) add(name, report.*field);
  for (const std::string& name : report.missing) add("missing", name);
  return text;
}

std::optional<HostReport> ReadReport(std::string_view text) {
  HostReport report;
  for (std::string_view line : Split(text, '\n')) {
    if (!line.starts_with(kLine)) continue;
    line.remove_prefix(kLine.size());
    const std::size_t space = std::min(line.find(' '), line.size());
    const std::string_view name = line.substr(0, space);
    const std::string value = core::Escaped(Trimmed(line.substr(space)));
    for (const auto& [known, field] : kFields) {
      if (name == known) report.*field = value;
    }
    if (name == "missing") report.missing.push_back(value);
  }
  if (report.version.empty()) return std::nullopt;
  return report;
}

LoadedLibraries ReadLdd(std::string_view text) {
  LoadedLibraries libraries;
  libraries.ours = PathIn(text, "libsirtaki.so");
  libraries.mpi = PathIn(text, "libmpi.");
  if (libraries.mpi.empty()) libraries.mpi = PathIn(text, "libmpich.");  // as Debian calls it
  for (const std::string_view line : Split(text, '\n')) {
    // A library that is none, or that is too old for the program.
    if (line.find("error while loading shared libraries") != std::string_view::npos ||
        line.find(": version `") != std::string_view::npos) {
      libraries.error = Trimmed(line);
    }
    const std::size_t arrow = line.find(kArrow);
    if (arrow != std::string_view::npos && line.substr(arrow).starts_with(kMissing)) {
      libraries.missing.emplace_back(Trimmed(line.substr(0, arrow)));
    }
  }
  return libraries;
}

std::string PathIn(std::string_view text, std::string_view name) {
  for (const std::string_view line : Split(text, '\n')) {
    const std::size_t arrow = line.find(kArrow);
    if (arrow == std::string_view::npos || !Trimmed(line).starts_with(name)) continue;
    if (line.substr(arrow).starts_with(kMissing)) continue;
    const std::string_view rest = line.substr(arrow + kArrow.size());
    return std::string(rest.substr(0, rest.rfind(" (")));
  }
  return "";
}

}  // namespace sirtaki::launch
