#include "mpi/gate.h"

namespace sirtaki::mpi {

core::Mutex& Gate() {
  static core::Mutex& gate = *new core::Mutex;  // MPI is called while the process exits
  return gate;
}

bool IsFinalized() {
  core::MutexLock lock(Gate());
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized != 0;
}

}  // namespace sirtaki::mpi
