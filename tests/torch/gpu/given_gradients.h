// Parameters, on GPUs or not, whose gradients a test gives instead of a model.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ops/cuda/cuda_api.h"
#include "sirtaki/optimizer.h"

namespace sirtaki::tests {

class GivenGradients {
 public:
  // Zeros of this shape. A gradient on a GPU is written when `stream` comes to it, which is the
  // current one of the hooks.
  at::Tensor Add(const std::string& name, at::IntArrayRef shape, at::Device device,
                 ops::cuda::StreamHandle stream = nullptr);

  // A backward pass in which these have a gradient, all elements of which are `value`, or these
  // elements. They become ready in this order.
  struct Gradient {
    std::string name;
    float value = 0;
    std::vector<float> elements = {};
  };
  void Backward(const std::vector<Gradient>& gradients);

  const NamedTensors& named() const { return named_; }
  const at::Tensor& operator[](const std::string& name) const;
  // The learning rate is 1.
  DistributedOptimizer<torch::optim::SGD> Wrap(const DistributedOptimizerOptions& options) const;

 private:
  NamedTensors named_;
  std::map<std::string, std::shared_ptr<at::Tensor>> given_;  // on the host
  std::vector<at::Tensor> kept_;  // all of them: a device may be some passes behind
};

}  // namespace sirtaki::tests
