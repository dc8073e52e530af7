// MPI's error codes as Status, and waiting for a request with a deadline. For the files of mpi/
// only.
#pragma once

#include <mpi.h>

#include "core/base/status.h"
#include "core/base/types.h"

namespace sirtaki::mpi {

// `call` names the MPI function: "MPI_Isend to rank 3". The text is the call's name and MPI's own
// words. Under the gate (mpi/gate.h).
core::Status Check(int code, const char* call);

// Tests the request until it is complete. kTimedOut at `deadline`: the request is then still
// active, and what it refers to must stay where it is for the life of the process.
core::Status WaitUntil(MPI_Request* request, core::TimePoint deadline, const char* call);

}  // namespace sirtaki::mpi
