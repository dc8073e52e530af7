// The compiled kernels of this build, for cuModuleLoadData.
#pragma once

#include <string>

namespace sirtaki::ops::cuda {

// Null if it was built without; `why` then says why.
const void* KernelImage(std::string* why);

}  // namespace sirtaki::ops::cuda
