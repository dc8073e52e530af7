// Stands in for GPU support where the build has none. CMake says why in the two macros.

#include "ops/cuda/cuda_support.h"

namespace sirtaki::ops {

const char* CudaBuildStatus() { return SIRTAKI_CUDA_STATUS; }
const char* NcclBuildStatus() { return SIRTAKI_NCCL_STATUS; }

}  // namespace sirtaki::ops
