#include "launch/base/numbered_files.h"

#include <charconv>
#include <filesystem>
#include <system_error>

namespace sirtaki::launch {
namespace {

namespace fs = std::filesystem;
using core::Status;

constexpr std::string_view kSuffix = ".json";

// -1: another name.
int NumberIn(const std::string& name, std::string_view prefix) {
  if (!name.starts_with(prefix) || !name.ends_with(kSuffix)) return -1;
  const char* const begin = name.data() + prefix.size();
  const char* const end = name.data() + name.size() - kSuffix.size();
  int number = -1;
  const auto [parsed, error] = std::from_chars(begin, end, number);
  return error == std::errc() && parsed == end ? number : -1;
}

Status Wrong(const std::string& path, const std::string& what) {
  return {core::StatusCode::kInvalidArgument, path + ": " + what};
}

}  // namespace

Status FindNumbered(const std::string& folder, std::string_view prefix,
                    std::map<int, std::string>* paths) {
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const int number = NumberIn(entry->path().filename().string(), prefix);
    if (number >= 0) (*paths)[number] = entry->path().string();
  }
  if (error) return Wrong(folder, error.message());
  if (paths->empty()) return Wrong(folder, "holds no " + std::string(prefix) + "<number>.json");
  return Status::Ok();
}

}  // namespace sirtaki::launch
