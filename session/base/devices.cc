#include "session/base/devices.h"

#include <array>
#include <utility>

#include "ops/cuda/kernel_image.h"

namespace sirtaki::session {

using core::Status;
using core::StatusCode;
namespace cuda = ops::cuda;

namespace {

Status OpenOfProcess(int index, std::shared_ptr<cuda::Device>* device) {
  struct Opened {
    cuda::Library library;
    Status status = cuda::Load(&library);
    core::Mutex mutex;
    std::map<int, std::shared_ptr<cuda::Device>> devices SIRTAKI_GUARDED_BY(mutex);
  };
  static Opened& opened = *new Opened;
  if (!opened.status.ok()) {
    return {opened.status.code(),
            opened.status.message() + "; a process looks once, when it first uses a GPU"};
  }
  core::MutexLock lock(opened.mutex);
  const auto found = opened.devices.find(index);
  if (found != opened.devices.end()) {
    *device = found->second;
    return Status::Ok();
  }
  Status status = cuda::Device::Open(opened.library.api, index, device);
  if (status.ok()) opened.devices.emplace(index, *device);
  return status;
}

}  // namespace

GpuLibraries GpuLibraries::OfProcess() {
  GpuLibraries libraries;
  libraries.open_device = OpenOfProcess;
  libraries.load_nccl = ops::nccl::Load;
  libraries.kernels = cuda::KernelImage(&libraries.why_no_kernels);
  libraries.kernels_toolkit = cuda::KernelToolkit();
  return libraries;
}

Status Gpu::Copy(const GpuLibraries& libraries, core::DType dtype, const void* from, void* to,
                 std::int64_t count, double factor, cuda::StreamHandle stream) {
  if (count == 0 || (factor == 1.0 && from == to)) return Status::Ok();
  const cuda::Device::Scope scope(*device_);
  if (!scope.status().ok()) return scope.status();
  if (factor == 1.0) {
    const std::int64_t bytes = count * BytesOf(dtype);
    return cuda::CopyBytes(device_->api(), to, from, bytes, cuda::CopyKind::kDeviceToDevice,
                           stream);
  }
  if (libraries.kernels == nullptr) return {StatusCode::kUnsupported, libraries.why_no_kernels};
  core::MutexLock lock(mutex_);
  if (kernels_ == nullptr) {
    Status status = cuda::Kernels::CheckDriver(device_->api(), libraries.kernels_toolkit);
    if (status.ok()) status = cuda::Kernels::Load(device_, libraries.kernels, &kernels_);
    if (!status.ok()) return status;
  }
  const std::array<cuda::CopySegment, 1> all = {{{from, to, count}}};
  return kernels_->Copy(dtype, dtype, all, {factor, 1}, {}, stream);
}

Status Gpu::Mark(cuda::StreamHandle stream, cuda::EventPtr* event) {
  const cuda::Device::Scope scope(*device_);  // whose default stream it may be
  if (!scope.status().ok()) return scope.status();
  return events_.Mark(stream, event);
}

Status Devices::Find(int index, std::shared_ptr<Gpu>* gpu) {
  core::MutexLock lock(mutex_);
  std::shared_ptr<Gpu>& found = gpus_[index];
  if (found == nullptr) {
    std::shared_ptr<cuda::Device> device;
    Status status = libraries_.open_device(index, &device);
    if (!status.ok()) {
      gpus_.erase(index);
      return status;
    }
    found = std::make_shared<Gpu>(static_cast<std::uint32_t>(gpus_.size() - 1), std::move(device));
  }
  *gpu = found;
  return Status::Ok();
}

}  // namespace sirtaki::session
