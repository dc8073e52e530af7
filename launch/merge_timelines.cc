#include "launch/merge_timelines.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "launch/numbered_files.h"

namespace sirtaki::launch {
namespace {

namespace fs = std::filesystem;
using core::Status;
using core::StatusCode;

Status Wrong(const std::string& path, const std::string& what) {
  return {StatusCode::kInvalidArgument, path + ": " + what};
}

// Appends the file's objects to an array that is open.
Status Append(const std::string& path, std::ofstream& to, bool* first) {
  std::ifstream from(path, std::ios::binary);
  if (!from) return Wrong(path, std::strerror(errno));
  std::string line;
  for (std::size_t number = 1; std::getline(from, line); ++number) {
    const bool last = from.eof();  // without the newline that every whole line has
    if (!line.empty() && line.back() == ',') line.pop_back();
    if (line.empty() || line == "[" || line == "]") continue;
    if (line.front() != '{' || !nlohmann::json::accept(line)) {
      if (last) break;
      return Wrong(path, "line " + std::to_string(number) + " is none of a timeline");
    }
    to << (*first ? "[\n" : ",\n") << line;
    *first = false;
  }
  return Status::Ok();
}

}  // namespace

Status FindTimelines(const std::string& folder, std::vector<std::string>* paths) {
  std::map<int, std::string> found;
  if (Status status = FindNumbered(folder, "rank-", &found); !status.ok()) return status;
  for (auto& [rank, path] : found) paths->push_back(std::move(path));
  return Status::Ok();
}

Status MergeTimelines(const std::vector<std::string>& paths, const std::string& output) {
  for (const std::string& path : paths) {
    std::error_code none;
    if (fs::equivalent(path, output, none)) {
      return Wrong(output, "is itself one of the timelines");
    }
  }
  std::ofstream to(output, std::ios::binary | std::ios::trunc);
  if (!to) return Wrong(output, std::strerror(errno));
  bool first = true;
  for (const std::string& path : paths) {
    if (Status status = Append(path, to, &first); !status.ok()) return status;
  }
  to << (first ? "[" : "") << "\n]\n";
  to.close();
  return to ? Status::Ok() : Wrong(output, std::strerror(errno));
}

}  // namespace sirtaki::launch
