// The reductions of ops/base/kernels.h as MPI's: its own where they mean exactly the same, ours
// elsewhere.
#pragma once

#include <mpi.h>

#include <map>
#include <utility>

#include "core/base/types.h"

namespace sirtaki::mpi {

// MPI_OP_NULL: MPI cannot do it.
struct Reduction {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op op = MPI_OP_NULL;
};

// Owned by a backend. For is thread-safe.
class Reductions {
 public:
  Reductions();
  // Frees ours; after a fault they are left behind, as a call may still use them.
  ~Reductions();
  Reductions(const Reductions&) = delete;
  Reductions& operator=(const Reductions&) = delete;

  // MPI_OP_NULL for those that ops::HasReduction does not name, too.
  Reduction For(core::ReduceOp op, core::DType dtype) const;

 private:
  std::map<std::pair<core::ReduceOp, core::DType>, MPI_Op> own_;
};

}  // namespace sirtaki::mpi
