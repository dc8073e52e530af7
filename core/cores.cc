#include "core/cores.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>
#include <vector>

namespace sirtaki::core {

namespace {

RankRanges AffinityMask() {
  RankRanges cpus;
  // Grows until it holds the kernel's mask (sched_getaffinity says EINVAL while it does not).
  for (int count = 1024; count <= (1 << 20); count *= 2) {
    cpu_set_t* mask = CPU_ALLOC(count);
    if (mask == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(count);
    const bool found = sched_getaffinity(0, bytes, mask) == 0;
    for (int cpu = 0; found && cpu < count; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, mask)) cpus.Add(cpu);
    }
    CPU_FREE(mask);
    if (found) return cpus;
  }
  return RankRanges::Span(0, std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN))) - 1);
}

std::optional<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// "max 100000" or "150000 100000".
double QuotaOfVersion2(const std::string& text) {
  std::istringstream in(text);
  double quota = 0;
  double period = 0;
  return in >> quota >> period && quota > 0 && period > 0 ? quota / period : 0;
}

double QuotaOfVersion1(const FileReader& read, const std::string& folder) {
  const auto number = [&](const char* name) {
    const std::optional<std::string> text = read(folder + name);
    double value = 0;
    return text && std::istringstream(*text) >> value ? value : 0.0;
  };
  const double quota = number("/cpu.cfs_quota_us");  // -1: none
  const double period = number("/cpu.cfs_period_us");
  return quota > 0 && period > 0 ? quota / period : 0;
}

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

bool HasController(const std::string& controllers, const std::string& wanted) {
  std::istringstream in(controllers);
  for (std::string name; std::getline(in, name, ',');) {
    if (name == wanted) return true;
  }
  return false;
}

}  // namespace

double CgroupCpuQuota(const FileReader& read) {
  double tightest = 0;
  const auto consider = [&tightest](double quota) {
    if (quota > 0 && (tightest == 0 || quota < tightest)) tightest = quota;
  };
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
          consider(QuotaOfVersion2(read(mount + path + "/cpu.max").value_or("")));
        }
      }
    } else if (HasController(controllers, "cpu")) {
      for (const std::string& path : paths) {
        for (const std::string& mount :
             {std::string("/sys/fs/cgroup/cpu"), "/sys/fs/cgroup/" + controllers}) {
          consider(QuotaOfVersion1(read, mount + path));
        }
      }
    }
  }
  return tightest;
}

CpuShare CpusOfThisProcess() { return {AffinityMask(), CgroupCpuQuota(ReadFile)}; }

int SharedCores(std::span<const CpuShare> processes) {
  RankRanges cpus;
  double quota = 0;
  bool limited = !processes.empty();
  for (const CpuShare& process : processes) {
    cpus.Add(process.cpus);
    quota = std::max(quota, process.quota);
    limited = limited && process.quota > 0;
  }
  double cores = static_cast<double>(cpus.Count());
  if (limited) cores = std::min(cores, quota);
  return std::max(1, static_cast<int>(cores));
}

}  // namespace sirtaki::core
