// The compiled kernels of this build, for cuModuleLoadData.
#pragma once

#include <string>

namespace sirtaki::ops::cuda {

// Null if it was built without; `why` then says why.
const void* KernelImage(std::string* why);
// The version of the CUDA whose nvcc has compiled them: 13000 is 13.0. 0: there are none.
int KernelToolkit();

}  // namespace sirtaki::ops::cuda
