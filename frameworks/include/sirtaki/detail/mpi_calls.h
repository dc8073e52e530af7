// <sirtaki/mpi.h> calls these. Communicators are numbers here: MPI's Fortran handles, or with the
// standard ABI those of MPI_Comm_toint.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/init_options.h"
#include "sirtaki/process_set.h"

namespace sirtaki::detail {

SIRTAKI_API void InitOn(int communicator, const InitOptions& options);
SIRTAKI_API int MakeCommunicator(const ProcessSet& set, std::chrono::milliseconds timeout);
SIRTAKI_API void PauseMpi(std::chrono::milliseconds timeout);
SIRTAKI_API void ResumeMpi(std::chrono::milliseconds timeout);
// What UnlockMpi takes.
SIRTAKI_API void* LockMpi();
SIRTAKI_API void UnlockMpi(void* gate) noexcept;
// The families of MPIs that this installation has modules for: "openmpi", "mpich", "abi".
SIRTAKI_API std::vector<std::string> MpiModules();

}  // namespace sirtaki::detail
