// only_mpi: a program of MPI's alone, without Sirtaki; its ranks meet again and again, until they
// are ended.
#include <mpi.h>

#include <cstdio>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int step = 0;; ++step) {
    MPI_Barrier(MPI_COMM_WORLD);
    if (step != 20) continue;
    std::printf("rank %d has begun\n", rank);
    std::fflush(stdout);
  }
}
