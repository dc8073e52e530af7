// A program with MPI calls of its own: it has MPI's headers and library from Sirtaki::mpi alone.

#include <sirtaki/mpi.h>

#include <iostream>

int main() {
  sirtaki::init();
  MPI_Comm ranks = sirtaki::communicator();
  int sum = 1;
  sirtaki::pause_mpi();
  MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, ranks);
  sirtaki::resume_mpi();
  MPI_Comm_free(&ranks);
  const bool right = sum == sirtaki::size();
  std::cout << "rank " << sirtaki::rank() << ": MPI counts " << sum << " ranks\n";
  sirtaki::shutdown();
  return right ? 0 : 1;
}
