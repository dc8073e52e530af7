#include "core/machine/cores.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <string>

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

}  // namespace

double CgroupCpuQuota(const FileReader& read) {
  double tightest = 0;
  const auto consider = [&tightest](double quota) {
    if (quota > 0 && (tightest == 0 || quota < tightest)) tightest = quota;
  };
  for (const CgroupFolder& folder : CgroupFolders("cpu", read)) {
    consider(folder.version == 2 ? QuotaOfVersion2(read(folder.path + "/cpu.max").value_or(""))
                                 : QuotaOfVersion1(read, folder.path));
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
