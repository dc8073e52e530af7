// This header is for programs with MPI code of their own: it starts a job on the ranks of a
// communicator, and makes communicators of the ranks of a process set. It needs <mpi.h>, and the
// MPI that the library was built with.
//
// With MPI_THREAD_MULTIPLE the program may call MPI from any thread while the library works: all of
// the library's messages are on communicators of its own. With MPI_THREAD_SERIALIZED program and
// library must not call MPI at the same time, which only a program can promise that makes all calls
// of both from one thread, and waits for every handle before it calls MPI.
#pragma once

#include <mpi.h>

#include <chrono>

#include "sirtaki/export.h"
#include "sirtaki/process_set.h"
#include "sirtaki/session.h"

namespace sirtaki {

namespace detail {
// MPI's Fortran handles: numbers, whatever MPI_Comm is.
SIRTAKI_API void InitOn(int communicator, const InitOptions& options);
SIRTAKI_API int MakeCommunicator(const ProcessSet& set, std::chrono::milliseconds timeout,
                                 const Session& session);
}  // namespace detail

// Joins a job of the ranks of `comm`, with their ranks there; other processes have jobs of their
// own, or none. MPI must be initialised, and `comm` must be an intra-communicator; it may be freed
// afterwards. Collective over `comm`. Throws what init() throws; invalid_argument for another
// communicator; unsupported in a build without MPI.
inline void init(MPI_Comm comm, const InitOptions& options = {}) {
  detail::InitOn(MPI_Comm_c2f(comm), options);
}

// Returns a new communicator of the ranks of a process set, in ascending order, with the error
// handler of MPI_COMM_WORLD. It belongs to the program, which frees it before it finalizes MPI.
// Collective over the set; if there are several calls, all ranks of the set make them in the same
// order. Throws unsupported without MPI_THREAD_MULTIPLE or without MPI, timed_out (for the whole
// group) if a rank does not come within `timeout`; 0: only the limits of the session hold.
inline MPI_Comm communicator(const ProcessSet& process_set = {},
                             std::chrono::milliseconds timeout = std::chrono::milliseconds(0),
                             const Session& session = {}) {
  return MPI_Comm_f2c(detail::MakeCommunicator(process_set, timeout, session));
}

}  // namespace sirtaki
