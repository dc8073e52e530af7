// Strings of all ranks, by MPI's non-blocking collectives. For the files of mpi/ only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/base/types.h"
#include "mpi/api.h"

namespace sirtaki::mpi {

// An exchange works on its buffers. On the heap, since a time-out leaves it to MPI for good.
struct ExchangeBuffers {
  std::string mine;
  std::uint64_t my_size = 0;
  std::vector<std::uint64_t> sizes;
  std::vector<int> counts;
  std::vector<int> displacements;
  std::vector<char> all;
  Request request;
};

// Gives `x.mine` and fills in the rest: the string of rank i is at displacements[i] of `x.all`.
// Collective. Errors: kTimedOut at the deadline, kBackend.
core::Status ExchangeOn(Comm comm, int size, core::TimePoint deadline, ExchangeBuffers& x);

}  // namespace sirtaki::mpi
