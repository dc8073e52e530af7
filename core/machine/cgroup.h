// Where the files of this process's cgroup are, versions 1 and 2.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace sirtaki::core {

// The text of a file, or nothing if it cannot be read.
using FileReader = std::function<std::optional<std::string>(const std::string& path)>;
std::optional<std::string> ReadFile(const std::string& path);

struct CgroupFolder {
  int version = 0;
  std::string path;
};

// Folders that hold limits of this process for `controller` ("cpu", "memory"), from its own cgroup
// up to the root; some may not exist.
std::vector<CgroupFolder> CgroupFolders(const std::string& controller, const FileReader& read);

}  // namespace sirtaki::core
