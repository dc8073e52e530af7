// The image of builds without nvcc. The macro is CMake's reason.
#include "ops/cuda/kernel_image.h"

namespace sirtaki::ops::cuda {

const void* KernelImage(std::string* why) {
  *why = "this build has no kernels for GPUs (" SIRTAKI_CUDA_STATUS ")";
  return nullptr;
}
int KernelToolkit() { return 0; }

}  // namespace sirtaki::ops::cuda
