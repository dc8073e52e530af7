#include "core/machine/cgroup.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>

#include "core/base/words.h"

namespace sirtaki::core {

namespace {

// A cgroup and those above it: "/a/b", "/a", "". Inside a container the path may be one of the
// host's that is not to be seen here; the mount's own root, the last, is the container's then.
std::vector<std::string> UpFrom(std::string path) {
  std::vector<std::string> result;
  while (!path.empty()) {
    if (path != "/") result.push_back(path);
    const std::size_t slash = path.rfind('/');
    path.resize(slash == std::string::npos ? 0 : slash);
  }
  result.emplace_back();
  return result;
}

}  // namespace

std::optional<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  try {
    return std::string(std::istreambuf_iterator<char>(file), {});
  } catch (const std::ios_base::failure&) {
    return std::nullopt;  // a folder can be opened, but not read
  }
}

std::vector<CgroupFolder> CgroupFolders(const std::string& controller, const FileReader& read) {
  std::vector<CgroupFolder> folders;
  // Lines are "hierarchy:controllers:path"; version 2 is hierarchy 0 without controllers.
  std::istringstream lines(read("/proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::vector<std::string> paths = UpFrom(line.substr(second + 1));
    if (controllers.empty()) {
      for (const std::string& path : paths) {
        for (const char* mount : {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}) {
          folders.push_back({2, mount + path});
        }
      }
    } else if (const auto names = Split(controllers, ',');
               std::find(names.begin(), names.end(), controller) != names.end()) {
      for (const std::string& path : paths) {
        folders.push_back({1, "/sys/fs/cgroup/" + controller + path});
        if (controllers != controller) {
          folders.push_back({1, "/sys/fs/cgroup/" + controllers + path});
        }
      }
    }
  }
  return folders;
}

}  // namespace sirtaki::core
