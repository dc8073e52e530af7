#include "core/config/mpi_families.h"

namespace sirtaki::core {

std::span<const MpiFamily> MpiFamilies() {
  static const std::vector<MpiFamily>& families = *new std::vector<MpiFamily>{
      {MpiChoice::kOpenMpi,
       "openmpi",
       "Open MPI",
       {"libmpi.so.40"},
       {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK"}},
      {MpiChoice::kMpich,
       "mpich",
       "MPICH or one of its family",
       {"libmpi.so.12", "libmpich.so.12"},
       {"PMI_RANK", "PMI_FD", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE", "PALS_NRANKS"}},
      {MpiChoice::kAbi,
       "abi",
       "an MPI of the standard ABI",
       {"libmpi_abi.so.0", "libmpi_abi.so.1"},
       {}}};
  return families;
}

}  // namespace sirtaki::core
