// The random state is that of LibTorch's own generators: of the CPU, and of the GPUs that a training uses.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace sirtaki::elastic {

class RandomState {
 public:
  RandomState() = default;  // of no place
  // The state now, where a training has come to this place.
  RandomState(std::int64_t place, const std::vector<c10::Device>& gpus);

  std::int64_t place() const { return place_; }
  void Restore() const;

 private:
  std::int64_t place_ = -1;
  std::vector<std::pair<at::Generator, at::Tensor>> kept_;
};

}  // namespace sirtaki::elastic
