// These functions start and end the membership in a job, and say which of its ranks this process
// is.
//
// Collective here means: every rank has to call it. Everything may be called from any thread.
#pragma once

#include <string>

#include "sirtaki/export.h"
#include "sirtaki/init_options.h"

namespace sirtaki {

// Joins the job that `mpirun` (or another launcher) has started; without one, a job of one rank.
// Initialises MPI if nobody did. Sets LibTorch's intra-op threads to this rank's share of the
// cores, unless the user chose a number (option `intra_op_threads` or OMP_NUM_THREADS). Collective.
//
// Every rank throws Error if any rank cannot start: for a bad option, different values of an option
// that has to agree, a peer that does not come up in time. Calling init() again while initialised
// does nothing, but throws InvalidArgument if the options differ from the first call's. After
// shutdown() init() may be called again.
SIRTAKI_API void init();
SIRTAKI_API void init(const InitOptions& options);

// Joins the job with options from the command line: takes the `--sirtaki-…` arguments out of argv
// and lowers argc, so that the program's own parser does not see them.
SIRTAKI_API void init(int& argc, char** argv);
SIRTAKI_API void init(int& argc, char** argv, const InitOptions& options);

// Leaves the job: waits until all ranks have called it (or ended) and what is under way is
// finished. Collective. Handles and optimizers made before throw NotInitialized when used
// afterwards. Does nothing if not initialised; never throws; a fault that no call has thrown is
// logged. It is called at exit if the program has not called it.
SIRTAKI_API void shutdown() noexcept;

SIRTAKI_API bool is_initialized() noexcept;

// These functions throw NotInitialized before init() and after shutdown(). Not collective.
SIRTAKI_API int rank();        // this process, 0 <= rank < size
SIRTAKI_API int size();        // the number of ranks in the job
SIRTAKI_API int local_rank();  // its rank among those of this host
SIRTAKI_API int local_size();
SIRTAKI_API int cross_rank();  // among the hosts that have this local rank
SIRTAKI_API int cross_size();
SIRTAKI_API bool is_homogeneous();  // all hosts have as many ranks

// Ends the job with a reason: every pending and later call, here and on the other ranks, throws
// `Aborted` with this text and this rank as its origin. Not collective. It does not wait for the
// other ranks, only until the messages to them are on their way: mostly a moment, at most 2 s.
SIRTAKI_API void abort(const std::string& reason);

}  // namespace sirtaki
