#include "launch/checks/check_machine.h"

#include <sys/resource.h>
#include <sys/statvfs.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "launch/base/shell_text.h"

namespace sirtaki::launch {

namespace {

std::string Mebibytes(std::uint64_t bytes) { return std::to_string(bytes >> 20U) + " MiB"; }

std::uint64_t LimitOf(decltype(RLIMIT_NOFILE) resource) {
  rlimit limit{};
  return getrlimit(resource, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

bool HasInfiniband() {
  std::error_code error;
  return std::filesystem::exists("/sys/class/infiniband", error) &&
         !std::filesystem::is_empty("/sys/class/infiniband", error) && !error;
}

}  // namespace

std::vector<BuildRow> FindMachineParts() {
  std::vector<BuildRow> rows;
  struct statvfs info {};
  if (statvfs("/dev/shm", &info) == 0) {
    rows.push_back(SharedMemoryRow(info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize));
  } else {
    rows.push_back({"/dev/shm", false, "there is none",
                    "an MPI wants it: mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm"});
  }
  rows.push_back(OpenFilesRow(LimitOf(RLIMIT_NOFILE)));
  rows.push_back(LockedMemoryRow(LimitOf(RLIMIT_MEMLOCK), HasInfiniband()));
  rows.push_back(NetworkRow(OwnInterfaces()));
  return rows;
}

BuildRow SharedMemoryRow(std::uint64_t free, std::uint64_t all) {
  BuildRow row{"/dev/shm", true, Mebibytes(free) + " free of " + Mebibytes(all), ""};
  constexpr std::uint64_t kEnough = 256U << 20U;
  if (all < kEnough) {
    row.cure =
        "an MPI may want more: docker run --shm-size 1g, or mount -o remount,size=1g /dev/shm";
  } else if (free < kEnough) {
    row.cure = "an MPI may want more: look at what has filled it (ls -l /dev/shm)";
  }
  return row;
}

BuildRow OpenFilesRow(std::uint64_t limit) {
  constexpr std::uint64_t kEnough = 1024;
  BuildRow row{"open files", true, "", ""};
  row.text = limit == RLIM_INFINITY ? "any number" : std::to_string(limit) + " for a process";
  if (limit < kEnough) row.cure = "a launcher of many ranks needs more: ulimit -n 4096";
  return row;
}

BuildRow LockedMemoryRow(std::uint64_t limit, bool has_infiniband) {
  const bool unlimited = limit == RLIM_INFINITY;
  BuildRow row{"locked memory", true, unlimited ? "any size" : Mebibytes(limit), ""};
  if (has_infiniband) row.text += ", for InfiniBand";
  if (has_infiniband && !unlimited) {
    row.cure =
        "InfiniBand needs it without a limit: \"* - memlock unlimited\" in "
        "/etc/security/limits.conf, or docker run --ulimit memlock=-1";
  }
  return row;
}

BuildRow NetworkRow(const std::vector<Interface>& interfaces) {
  std::vector<std::string> found;
  for (const Interface& one : interfaces) {
    if (one.loopback || IsOfContainers(one.name)) continue;
    const std::string subnet = SubnetOf(one);
    found.push_back(one.name + " " + AddressOf(one) + subnet.substr(subnet.find('/')));
  }
  if (found.empty()) {
    return {"network", false, "none but the loopback: ranks on this machine alone", ""};
  }
  return {"network", true, Joined(found, ", "), ""};
}

}  // namespace sirtaki::launch
