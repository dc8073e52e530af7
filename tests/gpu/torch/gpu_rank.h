// A rank with a real GPU, which it may share with others.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <string>

#include "tests/support/mpi_main.h"
#include "tests/support/no_gpu.h"
#include "tests/support/own_gpu.h"

namespace sirtaki::tests {

// Empty if LibTorch's CUDA part is there, and a GPU.
inline std::string WhyNoGpu() {
  // A program that links it has it loaded.
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) return dlerror();
  return torch::cuda::is_available() ? "" : "LibTorch finds no GPU";
}

// Skips with a reason where a rank has none.
class GpuRankTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    why_not_ = WhyNoGpu();
    if (!TrueOnAllRanks(why_not_.empty())) {
      if (why_not_.empty()) why_not_ = "another rank has no GPU";
      return;
    }
    const OwnGpu own = TakeGpu(static_cast<int>(torch::cuda::device_count()));
    device_ = torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(own.number));
    init();
  }
  static void TearDownTestSuite() { shutdown(); }
  void SetUp() override {
    if (!why_not_.empty()) return SkipWithoutGpu(why_not_);
    current_.reset_device(device_);
  }

  static const torch::Device& device() { return device_; }

  static inline std::string why_not_;
  static inline torch::Device device_{torch::kCPU};

 private:
  c10::OptionalDeviceGuard current_;
};

}  // namespace sirtaki::tests
