// The part of the environment that is made of MPI's types. For the files of mpi/ only.
#pragma once

#include <mpi.h>

#include <functional>

#include "core/base/status.h"
#include "core/base/types.h"
#include "mpi/environment.h"

namespace sirtaki::mpi {

struct Environment::Impl {
  MPI_Comm control = MPI_COMM_NULL;  // for Exchange
  int before_finalize_key = MPI_KEYVAL_INVALID;
  std::function<void()> before_finalize;
};

// MPI_Comm_dup with a deadline. The duplicate returns its errors. Collective.
core::Status DuplicateUntil(MPI_Comm comm, core::TimePoint deadline, MPI_Comm* duplicate);

}  // namespace sirtaki::mpi
