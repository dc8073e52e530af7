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

#include "core/base/status.h"
#include "frameworks/torch/calls/call_memory.h"
#include "frameworks/torch/session/session_state.h"
#include "ops/nccl/arena.h"
#include "session/base/devices.h"

namespace sirtaki::detail {

inline bool IsOnGpu(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// The GPU that the tensor is on, or why its session cannot use it.
std::string FindGpuOf(const at::Tensor& tensor, SessionState& session,
                      std::shared_ptr<session::Gpu>* gpu);

// Gives the tensors' GPUs their slots, in this order, before several threads use them first, each
// rank's in another order. What cannot be used is told by the first call with it.
void TakeSlots(const std::vector<at::Tensor>& tensors, SessionState& session);

// Ok if the calling thread's streams on these GPUs (null: on none) may take part now: before
// anything is put into them. Errors: those of ops::cuda::RefuseCapture, and LibTorch's.
core::Status CheckStreams(const CallGpus& gpus);

// FindUsableGpu finds the GPU of a tensor that is on one, before anything is computed there, for a call
// that is to take part now.
core::Status FindUsableGpu(const at::Tensor& tensor, SessionState& session,
                           std::shared_ptr<session::Gpu>* gpu);

// The call's inputs on GPUs are what the calling thread's streams have made by now. Errors: those
// of ops::cuda::NoteReady.
core::Status NoteReadyOnGpus(CallMemories& memory);

// What the calling thread's streams are given from now on finds the results on GPUs, whose memory
// waits for these streams. Lets go of what the operation has read. Throws Error.
void AwaitOnGpus(CallMemories& memory);

// After AwaitOnGpus, once: the results are as they should be, and whoever awaits them later waits
// for that as well. Throws Error, and what LibTorch throws.
void Settle(CallMemories& memory);

// Results that the calling thread's stream is given by now, of one GPU: memory for AwaitOnGpus, for
// whoever uses them in another one. Throws Error.
CallMemories NoteMade(const std::vector<at::Tensor>& results,
                      const std::shared_ptr<session::Gpu>& gpu);

// ---- gradients: many tensors, of which several threads make some each ----

// The work's tensor is made in the calling thread's current stream. Cheap within a backward pass: a
// stream is looked at once in each, and NoteReadyInStreams says later of many works that they are
// ready. Errors: those of ops::cuda::RefuseCapture, and LibTorch's.
core::Status NoteProducer(ops::cuda::DeviceWork& work, const session::Gpu& gpu);

// The tensors are what their producers have made by now. Works of one GPU; their threads may be
// others. One event for each stream, which they share. Errors: those of ops::cuda::NoteReady.
core::Status NoteReadyInStreams(const std::vector<core::WorkPtr>& works, session::Gpu& gpu);

// If the works' bucket has an arena: what the lane writes there comes behind what its readers have
// been given by now. Errors: as NoteReadyInStreams.
core::Status NoteVacant(const std::vector<core::WorkPtr>& works, session::Gpu& gpu);

// The calling thread's current stream goes on behind the arena's readers, which may use `copy` of
// what they read from then on. Throws Error.
void FollowReaders(const ops::nccl::Arena& arena, session::Gpu& gpu, const at::Tensor& copy);

// Results that one thread uses in the streams that are current there: each of these waits once for
// what many of them have in common.
class GpuWaits {
 public:
  // What the current stream is given from now on finds the work's result. `memory`, of the
  // allocator's, that the lane has used: it stays until the stream is through; undefined: none.
  // Precondition: the handle is done, with an ok status. Throws Error.
  void Await(const ops::cuda::DeviceWork& work, const session::Gpu& gpu, const at::Tensor& memory);

 private:
  std::vector<ops::cuda::EventPtr> awaited_;  // not their addresses: an event's may come again
};

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
