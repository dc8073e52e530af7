#include "mpi/exchange.h"

#include <cstddef>
#include <limits>
#include <numeric>

#include "mpi/check.h"
#include "mpi/gate.h"
#include "mpi/library.h"

namespace sirtaki::mpi {

using core::Status;
using core::StatusCode;
using core::TimePoint;

Status ExchangeOn(Comm comm, int size, TimePoint deadline, ExchangeBuffers& x) {
  const auto ranks = static_cast<std::size_t>(size);
  x.my_size = x.mine.size();
  x.sizes.resize(ranks);
  Status status = InMpi("MPI_Iallgather", [&] {
    return TheApi().IallgatherSizes(&x.my_size, x.sizes.data(), comm, &x.request);
  });
  if (status.ok()) status = WaitUntil(&x.request, deadline, "MPI_Iallgather");
  if (!status.ok()) return status;

  const std::uint64_t total = std::accumulate(x.sizes.begin(), x.sizes.end(), std::uint64_t{0});
  if (total > static_cast<std::uint64_t>(std::numeric_limits<int>::max())) {
    return {StatusCode::kUnsupported,
            "what the ranks exchange at the start is longer than 2 GiB together"};
  }
  int displacement = 0;
  for (const std::uint64_t bytes : x.sizes) {
    x.counts.push_back(static_cast<int>(bytes));
    x.displacements.push_back(displacement);
    displacement += static_cast<int>(bytes);
  }
  x.all.resize(total);
  status = InMpi("MPI_Iallgatherv", [&] {
    return TheApi().IallgathervBytes(x.mine.data(), static_cast<int>(x.my_size), x.all.data(),
                                     x.counts.data(), x.displacements.data(), comm, &x.request);
  });
  if (status.ok()) status = WaitUntil(&x.request, deadline, "MPI_Iallgatherv");
  return status;
}

}  // namespace sirtaki::mpi
