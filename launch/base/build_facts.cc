#include "launch/base/build_facts.h"

namespace sirtaki::launch {

BuildFacts FactsOfBuild() {
  return {SIRTAKI_VERSION, SIRTAKI_MPI_STATUS, SIRTAKI_TORCH_STATUS, SIRTAKI_CUDA_STATUS,
          SIRTAKI_MPIEXEC};
}

}  // namespace sirtaki::launch
