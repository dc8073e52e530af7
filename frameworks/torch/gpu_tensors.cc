#include "frameworks/torch/gpu_tensors.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <map>
#include <utility>

#include "frameworks/torch/throw.h"
#include "ops/cuda/device_work.h"

namespace sirtaki::detail {
namespace {

using c10::impl::DeviceGuardImplInterface;
using ops::cuda::DeviceWork;
using ops::cuda::StreamHandle;

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

c10::Device DeviceOf(const DeviceWork& work) {
  return {at::kCUDA, static_cast<c10::DeviceIndex>(work.device->index())};
}

c10::Stream CurrentStream(const DeviceWork& work) { return Guard().getStream(DeviceOf(work)); }

}  // namespace

std::string FindGpuOf(const at::Tensor& tensor, SessionState& session,
                      std::shared_ptr<frameworks::Gpu>* gpu) {
  if constexpr (!kTellsHandles<DeviceGuardImplInterface>) {
    return c10::str("a tensor on ", tensor.device(),
                    "; this build's LibTorch is too old for tensors on GPUs: 2.11 is known to do");
  }
  const core::Status status = session.session().FindGpu(tensor.device().index(), gpu);
  return status.ok() ? "" : c10::str("a tensor on ", tensor.device(), ": ", status.message());
}

core::Status NoteReadyOnGpus(const std::vector<CallMemory>& memory, SessionState& session) {
  std::map<const ops::cuda::Device*, const DeviceWork*> noted;  // one event a device
  for (const CallMemory& one : memory) {
    if (one.on_gpu == nullptr) continue;
    DeviceWork& work = *one.on_gpu;
    const auto [first, is_first] = noted.try_emplace(work.device.get(), &work);
    if (!is_first) {
      work.ready = first->second->ready;
      work.producer = first->second->producer;
      continue;
    }
    std::shared_ptr<frameworks::Gpu> gpu;
    core::Status status = session.session().FindGpu(work.device->index(), &gpu);
    if (status.ok()) {
      status = NoteReady(gpu->events(), HandleOf(Guard(), CurrentStream(work)), &work);
    }
    if (!status.ok()) return status;
  }
  return core::Status::Ok();
}

void AwaitOnGpus(const std::vector<CallMemory>& memory) {
  const ops::cuda::Event* last = nullptr;
  for (const CallMemory& one : memory) {
    if (one.on_gpu == nullptr) continue;
    const DeviceWork& work = *one.on_gpu;
    const c10::Stream stream = CurrentStream(work);
    if (work.done.get() != last) ThrowIfError(AwaitDone(work, HandleOf(Guard(), stream)));
    last = work.done.get();
    // It belongs to the lane's stream: it must not go back there before this one is through.
    if (one.arriving && one.arriving->tensor.defined()) {
      Guard().recordDataPtrOnStream(one.arriving->tensor.storage().data_ptr(), stream);
    }
  }
}

AllocatingStream::AllocatingStream(c10::Device device, StreamHandle stream) {
  if (stream == nullptr) return;
  // LibTorch's number of a stream that it has not made is its handle.
  const auto number = static_cast<c10::StreamId>(reinterpret_cast<std::intptr_t>(stream));
  before_ = Guard().exchangeStream(c10::Stream(c10::Stream::UNSAFE, device, number));
}

AllocatingStream::~AllocatingStream() {
  if (before_) Guard().exchangeStream(*before_);
}

}  // namespace sirtaki::detail
