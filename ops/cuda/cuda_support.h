#ifndef SIRTAKI_OPS_CUDA_CUDA_SUPPORT_H_
#define SIRTAKI_OPS_CUDA_CUDA_SUPPORT_H_

namespace sirtaki::ops {

// What this build can do with GPUs, as decided when it was configured: "on: …", or "off: …" or
// "not built yet: …" with the reason. One line, static storage, never null, callable from any
// thread.
const char* CudaBuildStatus();
const char* NcclBuildStatus();

}  // namespace sirtaki::ops

#endif  // SIRTAKI_OPS_CUDA_CUDA_SUPPORT_H_
