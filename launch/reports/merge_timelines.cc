#include "launch/reports/merge_timelines.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
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

// The object of another time and process, as the part has them.
std::string Moved(const TimelinePart& part, std::string_view text) {
  auto object = nlohmann::ordered_json::parse(text);
  const double later = Microseconds(part.later);
  if (const auto at = object.find("ts"); at != object.end() && at->is_number()) {
    *at = at->get<double>() + later;
  }
  object["pid"] = part.process;
  const auto name = object.find("name");
  if (name != object.end() && *name == "process_name") object["args"]["name"] = part.title;
  if (name != object.end() && *name == "process_sort_index") {
    object["args"]["sort_index"] = part.process;
  }
  return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Appends the file's objects to an array that is open.
Status Append(const TimelinePart& part, std::ofstream& to, bool* first) {
  const std::string& path = part.path;
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
      to << (*first ? "[\n" : ",\n");
      if (part.process < 0) {
        to << object;
      } else {
        to << Moved(part, object);
      }
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

}  // namespace

std::optional<TimelineHead> HeadOf(const std::string& path) {
  std::ifstream from(path, std::ios::binary);
  std::string line;
  while (std::getline(from, line) && ObjectIn(line).empty()) continue;
  const auto object = nlohmann::json::parse(ObjectIn(line), nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return std::nullopt;
  TimelineHead head;
  const auto arguments = object.find("args");
  if (arguments == object.end() || !arguments->is_object()) return head;
  const auto text = [&](const char* name) {
    const auto found = arguments->find(name);
    return found != arguments->end() && found->is_string() ? found->get<std::string>() : "";
  };
  head.session = text("session");
  head.host = text("host");
  if (const auto zero = arguments->find("zero");
      zero != arguments->end() && zero->is_number_integer()) {
    head.zero = core::TimePoint(std::chrono::nanoseconds(zero->get<std::int64_t>()));
  }
  return head;
}

Status FindTimelines(const std::string& folder, std::vector<TimelinePart>* parts,
                     std::vector<std::string>* notes) {
  std::map<int, std::string> found;
  if (Status status = FindNumbered(folder, "rank-", &found); !status.ok()) return status;
  std::optional<std::string> run;
  std::string first;
  for (auto& [rank, path] : found) {
    const std::optional<TimelineHead> head = HeadOf(path);
    if (head && !run) {
      run = head->session;
      first = path;
    }
    if (head && head->session != run) {
      notes->push_back(path + " was left out: it belongs to another run than " + first);
    } else {
      parts->push_back({.path = std::move(path)});
    }
  }
  return Status::Ok();
}

Status MergeTimelines(const std::vector<TimelinePart>& parts,
                      const std::vector<std::string>& objects, const std::string& output) {
  for (const TimelinePart& part : parts) {
    std::error_code none;
    if (fs::equivalent(part.path, output, none)) {
      return Wrong(output, "is itself one of the timelines");
    }
  }
  const std::string beside = output + ".new-" + std::to_string(getpid());
  std::ofstream to(beside, std::ios::binary | std::ios::trunc);
  if (!to) return Wrong(output, std::strerror(errno));
  Status status;
  bool first = true;
  for (const std::string& object : objects) {
    to << (std::exchange(first, false) ? "[\n" : ",\n") << object;
  }
  for (const TimelinePart& part : parts) {
    if (status.ok()) status = Append(part, to, &first);
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
