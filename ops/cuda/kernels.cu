// The kernels themselves: one for each pair of types and each operation, by name.
#include "ops/cuda/kernel_bodies.h"

namespace sirtaki::ops::cuda {

#define SIRTAKI_COPY(name, type) SIRTAKI_COPY_AS(name, type, type, false)
#define SIRTAKI_CONVERT(name, from, to) SIRTAKI_COPY_AS(name, from, to, true)
#define SIRTAKI_COPY_AS(name, from, to, scales)                                   \
  extern "C" __global__ void __launch_bounds__(kThreadsOfABlock)                  \
      sirtaki_##name(const __grid_constant__ CopyTable table) {                   \
    CopyTile<from, to, scales>(table, blockIdx.x, static_cast<int>(threadIdx.x)); \
  }
SIRTAKI_COPY_KERNELS(SIRTAKI_COPY)
SIRTAKI_CONVERT_KERNELS(SIRTAKI_CONVERT)

#define SIRTAKI_REDUCE(name, operation, type)                                                      \
  extern "C" __global__ void __launch_bounds__(kThreadsOfABlock)                                   \
      sirtaki_##name(const __grid_constant__ ReduceTable table) {                                  \
    ReduceElements<operation, type>(table,                                                         \
                                    static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x, \
                                    static_cast<long long>(gridDim.x) * blockDim.x);               \
  }
SIRTAKI_REDUCE_KERNELS(SIRTAKI_REDUCE)

}  // namespace sirtaki::ops::cuda
