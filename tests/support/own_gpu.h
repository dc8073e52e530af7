// Which GPU a rank takes, found by MPI alone: before init(), since it may change the environment,
// which other threads read from then on.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "examples/gpus.h"

namespace sirtaki::tests {

struct OwnGpu {
  int number = 0;
  bool shared = false;  // ranks have one together, this one or others
};

// `count`: of the GPUs that this rank sees, which the ranks of a host take in turn. Ranks that
// share one say to NCCL that they are of different hosts, or it refuses them. Collective over all
// ranks.
inline OwnGpu TakeGpu(int count) {
  MPI_Comm host = MPI_COMM_NULL;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  int local_rank = 0;
  int local_size = 0;
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(host, &local_rank);
  MPI_Comm_size(host, &local_size);
  MPI_Comm_free(&host);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);

  OwnGpu own;
  own.number = local_rank % count;
  constexpr int kLongest = 320;
  std::vector<char> texts(static_cast<std::size_t>(size) * kLongest);
  std::snprintf(&texts[static_cast<std::size_t>(rank) * kLongest], kLongest, "%s",
                examples::place_of_gpu(own.number).c_str());
  MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, texts.data(), kLongest, MPI_CHAR,
                MPI_COMM_WORLD);
  std::vector<std::string> places;
  for (int i = 0; i < size; ++i) {
    places.emplace_back(&texts[static_cast<std::size_t>(i) * kLongest]);
  }
  own.shared = !examples::who_shares_a_gpu(places).empty();
  if (own.shared) {
    setenv("NCCL_HOSTID", ("rank" + std::to_string(rank)).c_str(), 1);
    if (local_size == size) setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  }
  return own;
}

}  // namespace sirtaki::tests
