#include "frameworks/devices.h"

#include <array>
#include <cstddef>
#include <utility>

#include "ops/cuda/kernel_image.h"

namespace sirtaki::frameworks {

using core::Status;
using core::StatusCode;
namespace cuda = ops::cuda;

namespace {

// For the process: its handles and events may outlive every session.
Status LoadCudaOnce(const cuda::Library** library) {
  struct Loaded {
    cuda::Library library;
    Status status = cuda::Load(&library);
  };
  static const Loaded& loaded = *new Loaded;
  *library = &loaded.library;
  return loaded.status;
}

}  // namespace

GpuLibraries GpuLibraries::OfProcess() {
  GpuLibraries libraries;
  libraries.load_cuda = LoadCudaOnce;
  libraries.load_nccl = ops::nccl::Load;
  libraries.kernels = cuda::KernelImage(&libraries.why_no_kernels);
  return libraries;
}

Gpu::~Gpu() {
  // In the context that they were loaded into.
  if (kernels_ == nullptr) return;
  const cuda::Device::Scope scope(*device_);
  kernels_.reset();
}

Status Gpu::Copy(const GpuLibraries& libraries, core::DType dtype, const void* from, void* to,
                 std::int64_t count, double factor, cuda::StreamHandle stream) {
  if (count == 0 || (factor == 1.0 && from == to)) return Status::Ok();
  const cuda::Device::Scope scope(*device_);
  if (!scope.status().ok()) return scope.status();
  const cuda::Api& api = device_->api();
  if (factor == 1.0) {
    const std::size_t bytes = static_cast<std::size_t>(count) * core::SizeOf(dtype);
    return cuda::Check(api,
                       api.MemcpyAsync(to, from, bytes, cuda::CopyKind::kDeviceToDevice, stream),
                       "cudaMemcpyAsync");
  }
  if (libraries.kernels == nullptr) return {StatusCode::kUnsupported, libraries.why_no_kernels};
  core::MutexLock lock(mutex_);
  if (kernels_ == nullptr) {
    Status status = cuda::Kernels::Load(device_, libraries.kernels, &kernels_);
    if (!status.ok()) return status;
  }
  const std::array<cuda::CopySegment, 1> all = {{{from, to, count}}};
  return kernels_->Copy(dtype, dtype, all, {factor, 1}, {}, stream);
}

Status Gpu::Mark(cuda::StreamHandle stream, cuda::EventPtr* event) {
  const cuda::Device::Scope scope(*device_);  // whose default stream it may be
  if (!scope.status().ok()) return scope.status();
  Status status = events_.Take(event);
  return status.ok() ? (*event)->Record(stream) : status;
}

Status Devices::Find(int index, std::shared_ptr<Gpu>* gpu) {
  core::MutexLock lock(mutex_);
  std::shared_ptr<Gpu>& found = gpus_[index];
  if (found == nullptr) {
    const cuda::Library* library = nullptr;
    std::shared_ptr<cuda::Device> device;
    Status status = libraries_.load_cuda(&library);
    if (status.ok()) status = cuda::Device::Open(library->api, index, &device);
    if (!status.ok()) {
      gpus_.erase(index);
      return status;
    }
    found = std::make_shared<Gpu>(static_cast<std::uint32_t>(gpus_.size() - 1), std::move(device));
  }
  *gpu = found;
  return Status::Ok();
}

}  // namespace sirtaki::frameworks
