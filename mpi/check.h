// MPI's error codes as Status, and waiting for a request with a deadline. For the files of mpi/
// only.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/status.h"
#include "core/base/types.h"
#include "mpi/api.h"

namespace sirtaki::mpi {

// `call` names the MPI function: "MPI_Isend to rank 3". The text is the call's name and MPI's own
// words. Under the gate (mpi/gate.h).
core::Status Check(int code, const char* call);

// CheckReceived compares what a receive that has ended says of itself with what was expected; its
// error has both. Under the gate.
struct Expected {
  int source = -1;
  int tag = 0;
  std::int64_t bytes = 0;
};
core::Status CheckReceived(const Received& received, const Expected& expected,
                           const std::string& call);

// Tests the request until it is complete. kTimedOut at `deadline`: the request is then still
// active, and what it refers to must stay where it is for the life of the process.
core::Status WaitUntil(Request* request, core::TimePoint deadline, const char* call);

// MPI_Comm_dup with a deadline. The duplicate returns its errors. Collective.
core::Status DuplicateUntil(Comm comm, core::TimePoint deadline, Comm* duplicate);

}  // namespace sirtaki::mpi
