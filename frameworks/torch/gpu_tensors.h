// Tensors on GPUs: LibTorch's streams and its allocator, in the words of ops/cuda. What is asked of
// LibTorch is asked through c10, so that no library of its CUDA build is linked.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/status.h"
#include "frameworks/devices.h"
#include "frameworks/torch/call_memory.h"
#include "frameworks/torch/session_state.h"

namespace sirtaki::detail {

inline bool IsOnGpu(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// The GPU that the tensor is on, or why its session cannot use it.
std::string FindGpuOf(const at::Tensor& tensor, SessionState& session,
                      std::shared_ptr<frameworks::Gpu>* gpu);

// The call's inputs on GPUs are what the calling thread's streams have made by now. Errors: those
// of ops::cuda::NoteReady.
core::Status NoteReadyOnGpus(const std::vector<CallMemory>& memory, SessionState& session);

// What the calling thread's streams are given from now on finds the results on GPUs. Throws Error.
void AwaitOnGpus(const std::vector<CallMemory>& memory);

// While it lives, what the calling thread allocates on the device belongs to this stream; null: to
// that which it belonged to before.
class AllocatingStream {
 public:
  AllocatingStream(c10::Device device, ops::cuda::StreamHandle stream);
  ~AllocatingStream();
  AllocatingStream(const AllocatingStream&) = delete;
  AllocatingStream& operator=(const AllocatingStream&) = delete;

 private:
  std::optional<c10::Stream> before_;
};

}  // namespace sirtaki::detail
