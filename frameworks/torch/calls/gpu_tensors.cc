#include "frameworks/torch/calls/gpu_tensors.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <utility>

#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "ops/cuda/device_work.h"

namespace sirtaki::detail {
namespace {

using c10::impl::DeviceGuardImplInterface;
using ops::cuda::DeviceWork;
using ops::cuda::StreamHandle;

constexpr int kNoBackward = -1;  // autograd's word for it

const DeviceGuardImplInterface& Guard() { return *c10::impl::getDeviceGuardImpl(at::kCUDA); }

// Older versions of LibTorch do not tell it through c10.
template <class Guard>
constexpr bool kTellsHandles = requires(const Guard& guard, c10::Stream stream) {
  guard.getStreamNativeHandle(stream);
};

template <class Guard>
StreamHandle HandleOf(const Guard& guard, c10::Stream stream) {
  if constexpr (kTellsHandles<Guard>) {
    return static_cast<StreamHandle>(guard.getStreamNativeHandle(stream));
  } else {
    return nullptr;
  }
}

c10::Stream CurrentStream(const session::Gpu& gpu) {
  return Guard().getStream({at::kCUDA, static_cast<c10::DeviceIndex>(gpu.device()->index())});
}

StreamHandle CurrentHandle(const session::Gpu& gpu) {
  return HandleOf(Guard(), CurrentStream(gpu));
}

// LibTorch's number of a stream that it has not made is its handle.
c10::Stream StreamOf(StreamHandle stream, c10::Device device) {
  const auto number = static_cast<c10::StreamId>(reinterpret_cast<std::intptr_t>(stream));
  return c10::Stream(c10::Stream::UNSAFE, device, number);
}

// Says that the tensor's memory may be used again only when the stream has come past this.
void RecordOn(const at::Tensor& tensor, c10::Stream stream) {
  if (tensor.defined()) Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

}  // namespace

std::string FindGpuOf(const at::Tensor& tensor, SessionState& session,
                      std::shared_ptr<session::Gpu>* gpu) {
  if constexpr (!kTellsHandles<DeviceGuardImplInterface>) {
    return c10::str("the tensor is on ", tensor.device(),
                    "; this build's LibTorch is too old for GPUs: 2.11 is known to work");
  }
  const core::Status status = session.session().FindGpu(tensor.device().index(), gpu);
  return status.ok() ? "" : c10::str("the tensor is on ", tensor.device(), ": ", status.message());
}

void TakeSlots(const std::vector<at::Tensor>& tensors, SessionState& session) {
  for (const at::Tensor& tensor : tensors) {
    std::shared_ptr<session::Gpu> gpu;
    if (IsOnGpu(tensor)) static_cast<void>(FindGpuOf(tensor, session, &gpu));
  }
}

core::Status CheckStreams(const CallGpus& gpus) {
  const session::Gpu* last = nullptr;
  for (const auto& gpu : gpus) {
    if (gpu == nullptr || gpu.get() == last) continue;
    last = gpu.get();
    try {
      const core::Status status = RefuseCapture(*gpu->device(), CurrentHandle(*gpu));
      if (!status.ok()) return status;
    } catch (const std::exception& error) {
      return {core::StatusCode::kBackend, TextOf(error)};
    }
  }
  return core::Status::Ok();
}

core::Status FindUsableGpu(const at::Tensor& tensor, SessionState& session,
                           std::shared_ptr<session::Gpu>* gpu) {
  if (!IsOnGpu(tensor)) return core::Status::Ok();
  const std::string why = FindGpuOf(tensor, session, gpu);
  return why.empty() ? CheckStreams({*gpu}) : core::Status(core::StatusCode::kInvalidArgument, why);
}

core::Status NoteReadyOnGpus(CallMemories& memory) {
  std::map<const session::Gpu*, const DeviceWork*> noted;  // one event a device
  for (CallMemory& one : memory) {
    if (!one.on_gpu) continue;
    session::Gpu& gpu = *one.on_gpu->gpu;
    DeviceWork& work = *one.on_gpu->work;
    const auto [first, is_first] = noted.try_emplace(&gpu, &work);
    if (is_first) {
      const core::Status status = NoteReady(gpu.events(), CurrentHandle(gpu), &work);
      if (!status.ok()) return status;
    } else {
      work.ready = first->second->ready;
      work.producer = first->second->producer;
    }
    one.on_gpu->caller = work.producer;
  }
  return core::Status::Ok();
}

void AwaitOnGpus(CallMemories& memory) {
  const ops::cuda::Event* last = nullptr;
  for (CallMemory& one : memory) {
    if (!one.on_gpu) continue;
    OnGpu& part = *one.on_gpu;
    if (part.work != nullptr) {
      part.end = part.work->done;
      part.work.reset();
    }
    const c10::Stream stream = CurrentStream(*part.gpu);
    const StreamHandle handle = HandleOf(Guard(), stream);
    if (part.end.get() != last) {
      ThrowIfError(AwaitEvent(*part.gpu->device(), part.end, handle));
      last = part.end.get();
    }
    // What belongs to another stream, the lane's or the caller's, must not go back there before
    // this one is through.
    if (one.arriving) {
      RecordOn(one.arriving->tensor, stream);
    } else if (handle != part.caller) {
      RecordOn(one.moved, stream);
      RecordOn(one.result, stream);
    }
  }
}

void Settle(CallMemories& memory) {
  std::vector<OnGpu*> copied;
  for (CallMemory& one : memory) {
    if (one.Settle() && one.on_gpu) copied.push_back(&*one.on_gpu);
  }
  if (copied.empty()) return;
  std::map<const session::Gpu*, ops::cuda::EventPtr> ends;
  for (OnGpu* part : copied) {
    ops::cuda::EventPtr& end = ends[part->gpu.get()];
    if (end == nullptr) ThrowIfError(part->gpu->Mark(CurrentHandle(*part->gpu), &end));
    part->end = end;
  }
}

CallMemories NoteMade(const std::vector<at::Tensor>& results,
                      const std::shared_ptr<session::Gpu>& gpu) {
  const StreamHandle stream = CurrentHandle(*gpu);
  ops::cuda::EventPtr end;
  ThrowIfError(gpu->Mark(stream, &end));
  CallMemories made(results.size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    made[i].result = results[i];
    made[i].on_gpu = OnGpu{.gpu = gpu, .work = nullptr, .caller = stream, .end = end};
  }
  return made;
}

core::Status NoteProducer(DeviceWork& work, const session::Gpu& gpu) {
  // The last that this thread has looked at. Only a backward pass has a number.
  struct Look {
    int backward = kNoBackward;
    const ops::cuda::Device* device = nullptr;
    StreamHandle stream = nullptr;
    core::Status status;
  };
  thread_local Look last;
  try {
    work.producer = CurrentHandle(gpu);
    const ops::cuda::Device* const device = gpu.device().get();
    const int backward = torch::autograd::get_current_graph_task_id();
    if (backward == kNoBackward || backward != last.backward || device != last.device ||
        work.producer != last.stream) {
      last = {backward, device, work.producer, RefuseCapture(*device, work.producer)};
    }
    return last.status;
  } catch (const std::exception& error) {
    return {core::StatusCode::kBackend, TextOf(error)};
  }
}

core::Status NoteReadyInStreams(const std::vector<core::WorkPtr>& works, session::Gpu& gpu) {
  std::vector<const DeviceWork*> noted;  // one a stream, of which there are few
  for (const core::WorkPtr& one : works) {
    DeviceWork& work = ops::cuda::AsDeviceWork(*one);
    const auto first = std::find_if(noted.begin(), noted.end(), [&work](const DeviceWork* other) {
      return other->producer == work.producer;
    });
    if (first != noted.end()) {
      work.ready = (*first)->ready;
      continue;
    }
    core::Status status = NoteReady(gpu.events(), work.producer, &work);
    if (!status.ok()) return status;
    noted.push_back(&work);
  }
  return core::Status::Ok();
}

core::Status NoteVacant(const std::vector<core::WorkPtr>& works, session::Gpu& gpu) {
  const ops::nccl::ArenaPtr& arena = ops::cuda::AsDeviceWork(*works.front()).arena;
  if (!arena) return core::Status::Ok();
  std::vector<ops::cuda::EventPtr> vacant;
  for (const StreamHandle reader : arena->readers()) {
    const bool is_producer =
        std::any_of(works.begin(), works.end(), [reader](const core::WorkPtr& one) {
          return ops::cuda::AsDeviceWork(*one).producer == reader;
        });
    if (is_producer) continue;  // of what is ready behind it
    core::Status status = RefuseCapture(*gpu.device(), reader);
    ops::cuda::EventPtr event;
    if (status.ok()) status = gpu.Mark(reader, &event);
    if (!status.ok()) return status;
    vacant.push_back(std::move(event));
  }
  if (vacant.empty()) return core::Status::Ok();
  for (const core::WorkPtr& one : works) ops::cuda::AsDeviceWork(*one).vacant = vacant;
  return core::Status::Ok();
}

void FollowReaders(const ops::nccl::Arena& arena, session::Gpu& gpu, const at::Tensor& copy) {
  const StreamHandle current = CurrentHandle(gpu);
  for (const StreamHandle reader : arena.readers()) {
    if (reader == current) continue;
    ThrowIfError(RefuseCapture(*gpu.device(), reader));
    ops::cuda::EventPtr end;
    ThrowIfError(gpu.Mark(reader, &end));
    ThrowIfError(AwaitEvent(*gpu.device(), end, current));
    RecordOn(copy, StreamOf(reader, copy.device()));
  }
}

void GpuWaits::Await(const DeviceWork& work, const session::Gpu& gpu, const at::Tensor& memory) {
  if (work.done == nullptr) return;  // no rank had it
  const c10::Stream stream = CurrentStream(gpu);
  const StreamHandle handle = HandleOf(Guard(), stream);
  // Most have what the one before has: from the back.
  if (std::find(awaited_.rbegin(), awaited_.rend(), work.done) == awaited_.rend()) {
    ThrowIfError(AwaitDone(work, handle));
    awaited_.push_back(work.done);
  }
  if (handle != work.producer) RecordOn(memory, stream);
  if (work.arena) work.arena->NoteReader(handle);
}

AllocatingStream::AllocatingStream(c10::Device device, StreamHandle stream) {
  if (stream == nullptr) return;
  before_ = Guard().exchangeStream(StreamOf(stream, device));
}

AllocatingStream::~AllocatingStream() {
  if (before_) Guard().exchangeStream(*before_);
}

}  // namespace sirtaki::detail
