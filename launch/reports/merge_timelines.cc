#include "launch/reports/merge_timelines.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "launch/base/numbered_files.h"

namespace sirtaki::launch {
namespace {

namespace fs = std::filesystem;
using core::Status;
using core::StatusCode;

Status Wrong(const std::string& path, const std::string& what) {
  return {StatusCode::kInvalidArgument, path + ": " + what};
}

// The object that stands in a line of a timeline; empty if none does.
std::string_view ObjectIn(std::string_view line) {
  if (line.ends_with(',')) line.remove_suffix(1);
  return line == "[" || line == "]" ? std::string_view() : line;
}

bool IsObject(std::string_view text) {
  return text.starts_with('{') && nlohmann::json::accept(text);
}

// Appends the file's objects to an array that is open.
Status Append(const std::string& path, std::ofstream& to, bool* first) {
  std::ifstream from(path, std::ios::binary);
  if (!from) return Wrong(path, std::strerror(errno));
  std::string line;
  std::size_t bad = 0;  // the line that is none: an end that was cut off has nothing behind it
  for (std::size_t number = 1; std::getline(from, line); ++number) {
    if (line.empty()) continue;
    if (bad > 0) break;
    const std::string_view object = ObjectIn(line);
    if (object.empty()) continue;
    if (IsObject(object)) {
      to << (*first ? "[\n" : ",\n") << object;
      *first = false;
    } else {
      bad = number;
    }
  }
  if (bad > 0 && from) {
    return Wrong(path, "line " + std::to_string(bad) + " is not part of a timeline");
  }
  return from.bad() ? Wrong(path, std::strerror(errno)) : Status::Ok();
}

// The session is that of the run that wrote it, from its first object; none if not even that is
// there.
std::optional<std::string> SessionOf(const std::string& path) {
  std::ifstream from(path, std::ios::binary);
  std::string line;
  while (std::getline(from, line) && ObjectIn(line).empty()) continue;
  const auto object = nlohmann::json::parse(ObjectIn(line), nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return std::nullopt;
  const auto arguments = object.find("args");
  if (arguments == object.end() || !arguments->is_object()) return std::string();
  const auto session = arguments->find("session");
  const bool has = session != arguments->end() && session->is_string();
  return has ? session->get<std::string>() : std::string();
}

}  // namespace

Status FindTimelines(const std::string& folder, std::vector<std::string>* paths,
                     std::vector<std::string>* notes) {
  std::map<int, std::string> found;
  if (Status status = FindNumbered(folder, "rank-", &found); !status.ok()) return status;
  std::optional<std::string> run;
  std::string first;
  for (auto& [rank, path] : found) {
    const std::optional<std::string> session = SessionOf(path);
    if (session && !run) {
      run = session;
      first = path;
    }
    if (session && session != run) {
      notes->push_back(path + " was left out: it belongs to another run than " + first);
    } else {
      paths->push_back(std::move(path));
    }
  }
  return Status::Ok();
}

Status MergeTimelines(const std::vector<std::string>& paths, const std::string& output) {
  for (const std::string& path : paths) {
    std::error_code none;
    if (fs::equivalent(path, output, none)) {
      return Wrong(output, "is itself one of the timelines");
    }
  }
  const std::string beside = output + ".new-" + std::to_string(getpid());
  std::ofstream to(beside, std::ios::binary | std::ios::trunc);
  if (!to) return Wrong(output, std::strerror(errno));
  Status status;
  bool first = true;
  for (const std::string& path : paths) {
    if (status.ok()) status = Append(path, to, &first);
  }
  to << (first ? "[" : "") << "\n]\n";
  to.close();
  if (status.ok() && (!to || std::rename(beside.c_str(), output.c_str()) != 0)) {
    status = Wrong(output, std::strerror(errno));
  }
  if (!status.ok()) (void)unlink(beside.c_str());
  return status;
}

}  // namespace sirtaki::launch
