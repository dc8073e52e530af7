#include "frameworks/torch/elastic/random_state.h"

#include <ATen/Context.h>

#include <mutex>

namespace sirtaki::elastic {

RandomState::RandomState(std::int64_t place, const std::vector<c10::Device>& gpus) : place_(place) {
  std::vector<c10::Device> devices = gpus;
  devices.emplace_back(c10::kCPU);
  for (const c10::Device& device : devices) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    kept_.emplace_back(generator, generator.get_state());
  }
}

void RandomState::Restore() const {
  for (auto [generator, state] : kept_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

}  // namespace sirtaki::elastic
