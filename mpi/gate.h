// The gate keeps the process to one thread in MPI at a time. Every MPI call of the library passes
// it, whatever thread level MPI has: Open MPI's ob1 can complete a receive with MPI_SUCCESS and
// without its data while another thread makes progress. It is held for calls that cannot block,
// never across a wait. The exceptions: MPI_Finalize, which calls the program back, and what blocks
// where nobody else is in MPI, while it starts and while an engine pauses for a communicator of the
// program. For the files of mpi/ only.
#pragma once

#include <mpi.h>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "mpi/check.h"

namespace sirtaki::mpi {

core::Mutex& Gate();

// Makes one call, with its name and MPI's words if it fails.
template <typename Call>
core::Status InMpi(const char* name, const Call& call) {
  core::MutexLock lock(Gate());
  return Check(call(), name);
}

bool IsFinalized();

}  // namespace sirtaki::mpi
