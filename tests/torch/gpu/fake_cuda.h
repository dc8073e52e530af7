// LibTorch's side of CUDA over FakeGpus: streams of the calling thread, and memory that knows which
// stream it belongs to. This build's LibTorch has none of its own; what it computes on a GPU is for
// tests/gpu.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "ops/cuda/cuda_api.h"

namespace sirtaki::tests {

// Of the calling thread, which has the default one at first; null is that.
void SetCurrentStream(int device, ops::cuda::StreamHandle stream);
ops::cuda::StreamHandle CurrentStreamOf(int device);

// The stream that was current where the tensor was allocated; of those that at::empty has made.
ops::cuda::StreamHandle AllocatedOn(const at::Tensor& tensor);
// Those that its memory waits for before it may be used again.
std::vector<ops::cuda::StreamHandle> RecordedOn(const at::Tensor& tensor);

inline at::Device Cuda(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

// Memory of the test's, as a tensor on a GPU.
inline at::Tensor OnCuda(int index, std::vector<float>& memory) {
  return at::for_blob(memory.data(), {static_cast<std::int64_t>(memory.size())})
      .options(at::TensorOptions().dtype(at::kFloat).device(Cuda(index)))
      .target_device(Cuda(index))
      .make_tensor();
}

}  // namespace sirtaki::tests
