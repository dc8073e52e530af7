// What a session opens when a tensor on a GPU comes, out of FakeGpus.
#pragma once

#include <memory>

#include "frameworks/devices.h"
#include "tests/support/fake_gpus.h"

namespace sirtaki::tests {

// It and the fakes must outlive the sessions, and all that is left of their work.
class FakeLibraries {
 public:
  explicit FakeLibraries(FakeGpus& gpus) : gpus_(gpus) { cuda_.api = gpus.cuda(); }
  FakeLibraries(const FakeLibraries&) = delete;
  FakeLibraries& operator=(const FakeLibraries&) = delete;

  std::shared_ptr<frameworks::GpuLibraries> Make() {
    auto libraries = std::make_shared<frameworks::GpuLibraries>();
    libraries->load_cuda = [this](const ops::cuda::Library** library) {
      *library = &cuda_;
      return core::Status::Ok();
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
  ops::cuda::Library cuda_;
};

}  // namespace sirtaki::tests
