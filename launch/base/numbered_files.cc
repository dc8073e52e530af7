#include "launch/base/numbered_files.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <system_error>

#include "launch/base/shell_text.h"

namespace sirtaki::launch {
namespace {

namespace fs = std::filesystem;
using core::Status;

constexpr std::string_view kSuffix = ".json";

// -1: another name.
int NumberIn(const std::string& name, std::string_view prefix) {
  if (!name.starts_with(prefix) || !name.ends_with(kSuffix)) return -1;
  const std::string_view rest = std::string_view(name).substr(prefix.size());
  const std::string_view digits =
      rest.substr(0, rest.size() - std::min(rest.size(), kSuffix.size()));
  return NumberFrom<int>(digits, 0, std::numeric_limits<int>::max()).value_or(-1);
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
