#include "frameworks/torch/tensors/generators.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstddef>
#include <mutex>
#include <utility>

namespace sirtaki::detail {

std::vector<at::Generator> GeneratorsInUse() {
  std::vector<at::Generator> generators = {at::globalContext().defaultGenerator(at::kCPU)};
  if (!at::hasCUDA()) return generators;
  const at::CUDAHooksInterface& cuda = at::detail::getCUDAHooks();
  const at::Device current = c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
  for (int i = 0; i < cuda.getNumGPUs(); ++i) {
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(i));
    if (device != current && !cuda.hasPrimaryContext(device.index())) continue;
    generators.push_back(at::globalContext().defaultGenerator(device));
  }
  return generators;
}

GeneratorStates::GeneratorStates(std::vector<at::Generator> generators)
    : generators_(std::move(generators)) {
  for (at::Generator& generator : generators_) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    states_.push_back(generator.get_state());
  }
}

void GeneratorStates::PutInForce() {
  for (std::size_t i = 0; i < generators_.size(); ++i) {
    const std::lock_guard<std::mutex> lock(generators_[i].mutex());
    generators_[i].set_state(states_[i]);
  }
}

}  // namespace sirtaki::detail
