// The part of the environment that is made of MPI's handles. For the files of mpi/ only.
#pragma once

#include <functional>
#include <optional>

#include "core/base/status.h"
#include "core/base/types.h"
#include "mpi/api.h"
#include "mpi/environment.h"

namespace sirtaki::mpi {

struct Environment::Impl {
  Comm control;  // for Exchange
  std::optional<int> before_finalize_key;
  std::function<void()> before_finalize;
};

// MPI_Comm_dup with a deadline. The duplicate returns its errors. Collective.
core::Status DuplicateUntil(Comm comm, core::TimePoint deadline, Comm* duplicate);

}  // namespace sirtaki::mpi
