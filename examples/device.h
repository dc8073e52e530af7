// The device that a rank computes on, and the precision.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <sirtaki/torch.h>
#include <torch/cuda.h>

#include <cstddef>
#include <string>
#include <vector>

#include "flags.h"
#include "gpus.h"

namespace examples {

// Says why this rank cannot compute on a GPU; empty if it can. Call it before anything asks
// LibTorch for a GPU: LibTorch remembers that it has found none.
inline std::string why_no_gpu() {
  // LibTorch's part for GPUs is loaded, not linked, so that the same program starts where it, or
  // the libraries that it needs, are not installed.
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    return std::string("LibTorch's part for GPUs cannot be loaded: ") + dlerror();
  }
  return torch::cuda::is_available() ? "" : "LibTorch finds no GPU, or no driver";
}

// Whether the library can use this GPU together with the other ranks: it may have been built
// without nvcc, or NCCL may be missing.
inline bool takes_gpu(const torch::Device& device) {
  try {
    sirtaki::allreduce(torch::zeros({1}, device), sirtaki::AllreduceOptions().name("GPUs"));
    return true;
  } catch (const sirtaki::Error& error) {
    if (error.code() != sirtaki::ErrorCode::Unsupported) throw;
    return false;
  }
}

// `name`: cpu, cuda, or auto, which is cuda if every rank can use a GPU of its own. Ranks of one
// host take its GPUs in turn. Collective, since either all ranks compute on GPUs or none does;
// throws UsageError on every rank.
inline torch::Device choose_device(const std::string& name) {
  if (name == "cpu") return torch::kCPU;
  const std::vector<std::string> reasons = sirtaki::allgather_object(why_no_gpu(), "GPUs");
  for (std::size_t rank = 0; rank < reasons.size(); ++rank) {
    if (reasons[rank].empty()) continue;
    if (name == "auto") return torch::kCPU;
    throw UsageError("--device cuda: rank " + std::to_string(rank) +
                     " cannot compute on a GPU: " + reasons[rank]);
  }
  const auto devices = static_cast<int>(torch::cuda::device_count());
  const int number = sirtaki::local_rank() % devices;
  const std::string shared =
      who_shares_a_gpu(sirtaki::allgather_object(place_of_gpu(number), "places of GPUs"));
  if (!shared.empty() && name == "cuda") {
    throw UsageError("--device cuda: " + shared +
                     ", which NCCL refuses: start as many ranks as there are GPUs");
  }
  const torch::Device device(torch::kCUDA, static_cast<c10::DeviceIndex>(number));
  if (name == "auto" && (!shared.empty() || !takes_gpu(device))) return torch::kCPU;
  return device;
}

// Makes a GPU the current one: whatever names no device then uses it.
class CurrentDevice {
 public:
  explicit CurrentDevice(const torch::Device& device) {
    if (device.is_cuda()) guard_.reset_device(device);
  }

 private:
  c10::OptionalDeviceGuard guard_;
};

// Runs the forward pass in bfloat16, except the operations that LibTorch keeps in float32.
class Autocast {
 public:
  Autocast(const torch::Device& device, bool on) : type_(device.type()), on_(on) {
    if (!on_) return;
    at::autocast::set_autocast_dtype(type_, torch::kBFloat16);
    at::autocast::set_autocast_enabled(type_, true);
  }
  ~Autocast() {
    if (!on_) return;
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(type_, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const torch::DeviceType type_;
  const bool on_;
};

}  // namespace examples
