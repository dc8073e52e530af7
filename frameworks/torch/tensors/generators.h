// LibTorch's own generators, from which dropout and initialisation draw where a program gives none.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <vector>

namespace sirtaki::detail {

// The default generators of the CPU, of the calling thread's current GPU, and of each other GPU that
// this process uses. The current one counts before its first use as well: a function that is run twice
// may be the first that uses it.
std::vector<at::Generator> GeneratorsInUse();

// The state of generators at one moment. Generators are shared between threads, and are locked.
class GeneratorStates {
 public:
  explicit GeneratorStates(std::vector<at::Generator> generators);

  void PutInForce();
  const std::vector<at::Generator>& generators() const { return generators_; }

 private:
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;
};

}  // namespace sirtaki::detail
