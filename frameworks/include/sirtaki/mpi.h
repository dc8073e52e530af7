// This header is for programs with MPI code of their own: it starts a job on the ranks of a
// communicator, makes communicators of the ranks of a process set, and lets program and library call
// MPI in turn. It needs <mpi.h>, of the MPI that the program is started with: CMake's target
// Sirtaki::mpi brings the one that was there when the library was built.
//
// The library calls MPI from threads of its own, one at a time. A program must not call MPI at the
// same time, whatever thread level MPI has: Open MPI's usual way over a network (ob1) can say that a
// receive succeeded, and give none of its data, while another thread is in MPI. So a program's calls
// are made before init() and after shutdown(), or between pause_mpi() and resume_mpi(), or, if they
// cannot block, under an MpiGate. docs/mpi.md has examples.
#pragma once

#include <mpi.h>

#include <chrono>

#include "sirtaki/detail/mpi_calls.h"
#include "sirtaki/process_set.h"
#include "sirtaki/session.h"

namespace sirtaki {

// Joins a job of the ranks of `comm`, with their ranks there; other processes have jobs of their
// own, or none. MPI must be initialised, and `comm` must be an intra-communicator; it may be freed
// afterwards, unless elastic::run() is to join the job again by it. Collective over `comm`. Throws what
// init() throws; InvalidArgument for another handle than the one that began the session, even if its
// ranks are the same; Unsupported in a build without MPI.
inline void init(MPI_Comm comm, const InitOptions& options = {}) {
#ifdef MPI_ABI_VERSION
  detail::InitOn(MPI_Comm_toint(comm), options);
#else
  detail::InitOn(MPI_Comm_c2f(comm), options);
#endif
}

// Returns a new communicator of the ranks of a process set, in ascending order, with the error
// handler of MPI_COMM_WORLD. It belongs to the program, which frees it before it finalizes MPI.
// Collective over the set; if there are several calls, also for other sets, all ranks make them in
// the same order, one at a time. Throws Unsupported without MPI, TimedOut (for the whole group) if
// a rank does not come within `timeout`; 0: only the limits of the session hold.
inline MPI_Comm communicator(const ProcessSet& process_set = {},
                             std::chrono::milliseconds timeout = std::chrono::milliseconds(0)) {
  const int handle = detail::MakeCommunicator(process_set, timeout);
#ifdef MPI_ABI_VERSION
  return MPI_Comm_fromint(handle);
#else
  return MPI_Comm_f2c(handle);
#endif
}

// Returns when every rank has called it and all that was submitted before is over: from then on the
// library makes no MPI call, and the program may, blocking ones too. Calls of the library that are
// made meanwhile wait for resume_mpi(); on the thread that has paused, one that would wait throws
// InvalidArgument. Collective over the job. Throws InvalidArgument, on every rank, if MPI is paused
// already, a rank has joined, or another thread's operations go on; TimedOut (for the whole group)
// if a rank does not come within `timeout`; 0: only stall_limit holds.
inline void pause_mpi(std::chrono::milliseconds timeout = std::chrono::milliseconds(0)) {
  detail::PauseMpi(timeout);
}

// Ends the pause, when every rank has called it. Collective over the job. Throws what pause_mpi()
// throws; InvalidArgument if MPI is not paused.
inline void resume_mpi(std::chrono::milliseconds timeout = std::chrono::milliseconds(0)) {
  detail::ResumeMpi(timeout);
}

// Keeps the library out of MPI for as long as it lives: for calls of the program that cannot block
// (MPI_Isend, MPI_Test, MPI_Iallreduce), since the library waits meanwhile, and fails when it has
// waited for three times peer_timeout. Not to be held during a call of the library. Does nothing in a
// job without MPI. Its construction throws InvalidArgument if this thread has an MpiGate already,
// and Backend if another thread does not come out of MPI: for 10 s after a fault, without one for
// six times peer_timeout, at least 20 s.
class MpiGate {
 public:
  MpiGate() : gate_(detail::LockMpi()) {}
  ~MpiGate() { detail::UnlockMpi(gate_); }
  MpiGate(const MpiGate&) = delete;
  MpiGate& operator=(const MpiGate&) = delete;

 private:
  void* const gate_;
};

}  // namespace sirtaki
