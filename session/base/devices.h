// The GPUs that a rank works with. Free of LibTorch.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/base/types.h"
#include "ops/cuda/device.h"
#include "ops/cuda/kernels.h"
#include "ops/nccl/nccl_api.h"

namespace sirtaki::session {

// The libraries that work with GPUs are opened when the first tensor on one comes. Tests have fakes.
struct GpuLibraries {
  // The device has CUDA's index; kUnsupported where there is no CUDA.
  std::function<core::Status(int index, std::shared_ptr<ops::cuda::Device>* device)> open_device;
  std::function<core::Status(ops::nccl::Library* library)> load_nccl;
  const void* kernels = nullptr;  // ops::cuda::KernelImage; null: `why_no_kernels`
  std::string why_no_kernels;
  int kernels_toolkit = 0;  // ops::cuda::KernelToolkit

  // CUDA is opened once, and the devices stay for ever: what LibTorch has made in a stream of ours
  // may outlive every session.
  static GpuLibraries OfProcess();
};

// A Gpu is one of those that a rank works with. Thread-safe.
class Gpu {
 public:
  Gpu(std::uint32_t slot, std::shared_ptr<ops::cuda::Device> device)
      : slot_(slot), device_(std::move(device)), events_(device_) {}
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  std::uint32_t slot() const { return slot_; }
  const std::shared_ptr<ops::cuda::Device>& device() const { return device_; }
  ops::cuda::EventPool& events() { return events_; }

  // ---- what a world of one rank needs, which has no lanes ----

  // Puts a copy into a stream of the device, multiplied by `factor`; from == to if only that is
  // wanted. Errors: those of CUDA; kUnsupported for a factor without kernels (`libraries`).
  core::Status Copy(const GpuLibraries& libraries, core::DType dtype, const void* from, void* to,
                    std::int64_t count, double factor, ops::cuda::StreamHandle stream)
      SIRTAKI_EXCLUDES(mutex_);

  // The place behind all that is in the stream now.
  core::Status Mark(ops::cuda::StreamHandle stream, ops::cuda::EventPtr* event);

 private:
  const std::uint32_t slot_;
  const std::shared_ptr<ops::cuda::Device> device_;
  ops::cuda::EventPool events_;
  core::Mutex mutex_;
  std::unique_ptr<ops::cuda::Kernels> kernels_ SIRTAKI_GUARDED_BY(mutex_);  // from the first use
};

// The devices are a session's GPUs. A GPU's slot is its place in the order of their first use, so that
// ranks agree on it whichever GPUs they have. Thread-safe; a GPU that nobody asks for is not touched.
class Devices {
 public:
  explicit Devices(GpuLibraries libraries) : libraries_(std::move(libraries)) {}

  const GpuLibraries& libraries() const { return libraries_; }

  // `index`: CUDA's, of a device where the program has a tensor. Errors: kUnsupported without CUDA;
  // those of CUDA.
  core::Status Find(int index, std::shared_ptr<Gpu>* gpu) SIRTAKI_EXCLUDES(mutex_);

 private:
  const GpuLibraries libraries_;
  core::Mutex mutex_;
  std::map<int, std::shared_ptr<Gpu>> gpus_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::session
