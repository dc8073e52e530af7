// What a session opens when a tensor on a GPU comes, out of FakeGpus.
#pragma once

#include <memory>

#include "session/base/devices.h"
#include "tests/support/fake_gpus.h"

namespace sirtaki::tests {

// It and the fakes must outlive the sessions, and all that is left of their work.
class FakeLibraries {
 public:
  explicit FakeLibraries(FakeGpus& gpus) : gpus_(gpus) {}
  FakeLibraries(const FakeLibraries&) = delete;
  FakeLibraries& operator=(const FakeLibraries&) = delete;

  std::shared_ptr<session::GpuLibraries> Make() {
    auto libraries = std::make_shared<session::GpuLibraries>();
    libraries->open_device = [this](int index, std::shared_ptr<ops::cuda::Device>* device) {
      return ops::cuda::Device::Open(gpus_.cuda(), index, device);
    };
    libraries->load_nccl = [this](ops::nccl::Library* library) {
      library->api = gpus_.nccl();
      library->version = ops::nccl::kDeclaredVersion;
      return core::Status::Ok();
    };
    libraries->kernels = "an image";
    return libraries;
  }

 private:
  FakeGpus& gpus_;
};

}  // namespace sirtaki::tests
