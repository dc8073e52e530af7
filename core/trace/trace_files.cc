#include "core/trace/trace_files.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "core/base/text.h"

namespace sirtaki::core::trace {
namespace {

namespace fs = std::filesystem;

std::string InFolder(const std::string& folder, const std::string& name) {
  return (fs::path(folder) / name).string();
}

std::string NameOfGeneration(int generation) { return "generation-" + std::to_string(generation); }

std::string FileOfGeneration(const fs::path& path, int generation) {
  return (path.parent_path() / NameOfGeneration(generation) / path.filename()).string();
}

}  // namespace

std::string TimelinePath(const std::string& option, int rank) {
  if (option.empty()) return {};
  if (option.ends_with(".json")) return rank == 0 ? option : std::string();
  return InFolder(option, "rank-" + std::to_string(rank) + ".json");
}

std::string TimelineOfGeneration(const std::string& option, int generation) {
  if (option.empty()) return {};
  return option.ends_with(".json") ? FileOfGeneration(option, generation)
                                   : InFolder(option, NameOfGeneration(generation));
}

std::string FlightRecordPath(const std::string& folder, int rank) {
  return InFolder(folder, "flight-" + std::to_string(rank) + ".json");
}

std::string MetricsPath(const std::string& option, int rank) {
  fs::path path(option);
  const std::string ending = path.extension().string();
  path.replace_extension("." + std::to_string(rank) + ending);
  return path.string();
}

std::string MetricsOfGeneration(const std::string& option, int generation) {
  if (option.empty() || IsPrometheus(option)) return option;
  return FileOfGeneration(option, generation);
}

bool IsPrometheus(std::string_view path) { return path.ends_with(".prom"); }

Status StuckFile(std::string_view what, const std::string& path, Duration patience) {
  return {StatusCode::kBackend, std::string(what) + " \"" + path +
                                    "\" is left as it is: a write to it has not ended for " +
                                    DurationText(patience)};
}

Status MakeFoldersOf(const std::string& path) {
  const fs::path folder = fs::path(path).parent_path();
  if (folder.empty()) return Status::Ok();
  std::error_code error;
  fs::create_directories(folder, error);
  std::error_code unknown;
  if (!error || fs::is_directory(folder, unknown)) return Status::Ok();
  return {StatusCode::kBackend,
          "the folder \"" + folder.string() + "\" cannot be made: " + error.message()};
}

Status ReplaceFile(const std::string& path, std::string_view text) {
  if (Status status = MakeFoldersOf(path); !status.ok()) return status;
  const std::string beside = path + ".new-" + std::to_string(getpid());
  errno = 0;
  std::ofstream file(beside, std::ios::binary | std::ios::trunc);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  if (file && std::rename(beside.c_str(), path.c_str()) == 0) return Status::Ok();
  const std::string why = std::strerror(errno);
  (void)unlink(beside.c_str());
  return {StatusCode::kBackend, "\"" + path + "\" cannot be written: " + why};
}

Status SetAside(const std::string& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return Status::Ok();
  const fs::path from(path);
  const std::string to = (from.parent_path() / "previous" / from.filename()).string();
  if (Status status = MakeFoldersOf(to); !status.ok()) return status;
  fs::rename(from, to, error);
  // Another job in the same folder may have been quicker.
  if (!error || error == std::errc::no_such_file_or_directory) return Status::Ok();
  return {StatusCode::kBackend,
          "\"" + path + "\" cannot be moved to \"" + to + "\": " + error.message()};
}

}  // namespace sirtaki::core::trace
