#include "frameworks/python/build_facts.h"
#include "sirtaki/mpi.h"

namespace sirtaki::python {

const bool kMpiBuilt = true;

bool MpiThreadsMultiple() {
  const MpiGate gate;
  int initialized = 0;
  int finalized = 0;
  int provided = MPI_THREAD_SINGLE;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized == 0 || finalized != 0) return false;
  MPI_Query_thread(&provided);
  return provided == MPI_THREAD_MULTIPLE;
}

}  // namespace sirtaki::python
