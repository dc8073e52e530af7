#include "core/machine/memory_limit.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <sstream>

namespace sirtaki::core {

std::int64_t CgroupMemoryLimit(const FileReader& read) {
  std::int64_t tightest = 0;
  for (const CgroupFolder& folder : CgroupFolders("memory", read)) {
    const char* const name = folder.version == 2 ? "/memory.max" : "/memory.limit_in_bytes";
    std::istringstream text(read(folder.path + name).value_or(""));
    std::int64_t limit = 0;
    // "max" in version 2, and in version 1 a number near the largest there is, mean none.
    if (!(text >> limit) || limit <= 0 || limit > std::numeric_limits<std::int64_t>::max() / 2) {
      continue;
    }
    tightest = tightest == 0 ? limit : std::min(tightest, limit);
  }
  return tightest;
}

std::int64_t MemoryOfHost() {
  const std::int64_t physical =
      static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  const std::int64_t allowed = CgroupMemoryLimit(ReadFile);
  return allowed > 0 ? std::min(physical, allowed) : physical;
}

std::int64_t AddressLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return 0;
  return static_cast<std::int64_t>(
      std::min<rlim_t>(limit.rlim_cur, std::numeric_limits<std::int64_t>::max()));
}

}  // namespace sirtaki::core
