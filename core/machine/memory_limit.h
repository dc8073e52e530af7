// How much memory processes of this host may take.
#pragma once

#include <cstdint>

#include "core/machine/cgroup.h"

namespace sirtaki::core {

// The tightest limit of memory from this process's cgroup up to the root, in bytes; 0: none.
std::int64_t CgroupMemoryLimit(const FileReader& read);

// The memory is what the host has, or the cgroup allows if that is less.
std::int64_t MemoryOfHost();

// The limit of this process's addresses (RLIMIT_AS), in bytes; 0: none.
std::int64_t AddressLimit();

}  // namespace sirtaki::core
