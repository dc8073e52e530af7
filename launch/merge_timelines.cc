#include "launch/merge_timelines.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

namespace sirtaki::launch {
namespace {

namespace fs = std::filesystem;
using core::Status;
using core::StatusCode;

constexpr std::string_view kPrefix = "rank-";
constexpr std::string_view kSuffix = ".json";

// The number in "rank-12.json"; -1: another name.
int RankOf(const std::string& name) {
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return -1;
  const char* const begin = name.data() + kPrefix.size();
  const char* const end = name.data() + name.size() - kSuffix.size();
  int rank = -1;
  const auto [parsed, error] = std::from_chars(begin, end, rank);
  return error == std::errc() && parsed == end ? rank : -1;
}

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
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const int rank = RankOf(entry->path().filename().string());
    if (rank >= 0) found[rank] = entry->path().string();
  }
  if (error) return Wrong(folder, error.message());
  if (found.empty()) return Wrong(folder, "holds no rank-<number>.json");
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
