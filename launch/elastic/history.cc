#include "launch/elastic/history.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "core/config/config.h"
#include "core/trace/trace_files.h"
#include "launch/plan/routes.h"

namespace sirtaki::launch {
namespace {

using core::Status;
using NoteKind = GenerationNote::Kind;

// Appends the lines, in place of an earlier job's if it is the `first` time.
Status Append(const std::string& path, const std::string& lines, bool first) {
  Status status = first ? core::trace::SetAside(path) : Status::Ok();
  if (first && status.ok()) status = core::trace::MakeFoldersOf(path);
  if (!status.ok()) return status;
  std::ofstream file(path, std::ios::binary | std::ios::app);
  file << lines << std::flush;
  return file ? status : Status(core::StatusCode::kBackend, path + ": " + std::strerror(errno));
}

namespace fs = std::filesystem;

// The files of the history; an empty path: there is none.
struct Places {
  std::string timeline;
  std::string records;
};

// The folders are those of the configuration that the ranks read. Where that is wrong, they say so.
Places PlacesOf(const LaunchOptions& options, core::EnvironmentView env) {
  for (const auto& [name, value] : options.knobs) env.Set(name, value);
  core::Config config;
  if (!core::ParseConfig({}, env, {}, &config, nullptr).ok()) return {};
  const auto in = [](const fs::path& folder) {
    return fs::absolute(folder / kGenerationsFile).string();
  };
  Places places;
  const fs::path timeline = config.timeline;
  if (!timeline.empty()) {
    places.timeline = in(config.timeline.ends_with(".json") ? timeline.parent_path() : timeline);
  }
  if (config.flight_records == core::kNoFlightRecords) return places;
  const bool is_auto = config.flight_records == core::kAutoFlightRecords;
  places.records =
      in(is_auto ? fs::path(core::trace::kRecordFolder) : fs::path(config.flight_records));
  return places;
}

}  // namespace

History::History(const LaunchOptions& options, const core::EnvironmentView& env)
    : host_(HostName()) {
  const Places places = PlacesOf(options, env);
  if (!places.timeline.empty()) files_.push_back({places.timeline, true, false});
  if (!places.records.empty() && places.records != places.timeline) {
    files_.push_back({places.records, false, false});
  }
}

void SetHistoriesAside(const LaunchOptions& options, const core::EnvironmentView& env) {
  const Places places = PlacesOf(options, env);
  for (const std::string& path : {places.timeline, places.records}) {
    const Status status = path.empty() ? Status::Ok() : core::trace::SetAside(path);
    if (!status.ok()) std::fprintf(stderr, "sirtakirun: %s\n", status.message().c_str());
  }
}

void History::Write(GenerationNote note) {
  if (note.host.empty()) note.host = host_;
  const bool explains = note.kind == NoteKind::kLeft || note.kind == NoteKind::kOver;
  const std::string line = ToLine(note) + "\n";
  waiting_ += line;
  bool waits = false;
  std::erase_if(files_, [&](File& file) {
    if (!file.has_begun && !file.begins_at_once && !explains) {
      waits = true;
      return false;
    }
    const bool first = !std::exchange(file.has_begun, true);
    const Status status = Append(file.path, first ? waiting_ : line, first);
    if (!status.ok()) {
      std::fprintf(stderr, "sirtakirun: the job goes on without its history: %s\n",
                   status.message().c_str());
    }
    return !status.ok();
  });
  if (!waits) waiting_.clear();
}

}  // namespace sirtaki::launch
