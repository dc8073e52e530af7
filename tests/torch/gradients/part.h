// What several tests of gradients train.
#pragma once

#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <string>

namespace sirtaki::tests {

// A model of one layer with an optimizer of its own.
struct Part {
  explicit Part(const std::string& name, const DistributedOptimizerOptions& options = {})
      : optimizer(torch::optim::SGD(layer->parameters(), 1.0), layer->named_parameters(),
                  DistributedOptimizerOptions(options).name(name)) {
    torch::NoGradGuard no_grad;
    for (auto& parameter : layer->parameters()) parameter.fill_(1);
  }
  // The gradient of every element is `factor`.
  torch::Tensor Loss(float factor) { return (layer->weight.sum() + layer->bias.sum()) * factor; }
  void ExpectGradient(float value) const {
    for (const auto& parameter : layer->parameters()) {
      ASSERT_TRUE(parameter.grad().defined());
      EXPECT_TRUE(torch::allclose(parameter.grad(), torch::full_like(parameter, value)))
          << parameter.grad() << " instead of " << value;
    }
  }
  torch::nn::Linear layer{3, 2};
  DistributedOptimizer<torch::optim::SGD> optimizer;
};

}  // namespace sirtaki::tests
