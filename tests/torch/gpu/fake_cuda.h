// LibTorch's side of CUDA over FakeGpus: streams of the calling thread, and memory that knows which
// stream it belongs to. This build's LibTorch has none of its own; what it computes on a GPU is for
// tests/gpu.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "ops/cuda/cuda_api.h"

namespace sirtaki::tests {

// The current stream is the calling thread's, which has the default one at first; null is that.
void SetCurrentStream(int device, ops::cuda::StreamHandle stream);
ops::cuda::StreamHandle CurrentStreamOf(int device);
// Until all is over that stands in the calling thread's current stream.
void WaitForStream(at::Device device);
// How often a thread has waited for this GPU, to hand it a value or to take one.
int ReadBacks(at::Device device);
void NoteReadBack(at::Device device);

// The tensor was allocated here, and is not the test's own memory. When it is freed the stream that
// was current where it was allocated overwrites it, behind what that has to do, and behind what
// those have to do that were recorded: a real allocator would give it to somebody else there.
ops::cuda::StreamHandle AllocatedOn(const at::Tensor& tensor);
std::vector<ops::cuda::StreamHandle> RecordedOn(const at::Tensor& tensor);
int LiveBlocksOn(int device);
// The next allocation throws what LibTorch throws, with this text.
void FailNextAllocation(const char* text);

inline at::Device Cuda(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

// Memory of the test's, as a tensor on a GPU. `gone`: called when the last tensor goes.
inline at::Tensor OnCuda(int index, std::vector<float>& memory,
                         const std::vector<std::int64_t>& sizes,
                         const std::vector<std::int64_t>& strides,
                         const std::function<void()>& gone = nullptr) {
  return at::for_blob(memory.data(), sizes)
      .strides(strides)
      .deleter([gone](void*) {
        if (gone) gone();
      })
      .options(at::TensorOptions().dtype(at::kFloat).device(Cuda(index)))
      .target_device(Cuda(index))
      .make_tensor();
}
inline at::Tensor OnCuda(int index, std::vector<float>& memory,
                         const std::function<void()>& gone = nullptr) {
  return OnCuda(index, memory, {static_cast<std::int64_t>(memory.size())}, {1}, gone);
}

}  // namespace sirtaki::tests
