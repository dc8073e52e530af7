// A small net with data, the same on every rank and in every run without a random generator, so
// that what N ranks learn can be compared with what one learns from the joined batch.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace sirtaki::tests {

// Numbers without a pattern that training could miss; float64.
inline torch::Tensor Waves(torch::IntArrayRef shape, double phase) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return torch::sin(torch::arange(count, torch::kDouble) * 1.7 + phase).reshape(shape);
}

struct SmallNet : torch::nn::Module {
  SmallNet() : hidden(5, 7), output(7, 3) {
    register_module("hidden", hidden);
    register_module("output", output);
    to(torch::kDouble);
    torch::NoGradGuard no_grad;
    double phase = 0;
    for (auto& parameter : parameters())
      parameter.copy_(0.5 * Waves(parameter.sizes(), phase += 1));
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::tanh(hidden(x))); }

  torch::nn::Linear hidden;
  torch::nn::Linear output;
};

struct Batch {
  torch::Tensor x;
  torch::Tensor y;
};

inline Batch BatchOfRank(int step, int rank) {
  constexpr std::int64_t kRows = 4;
  const double phase = 100.0 * step + 10.0 * rank;
  return {Waves({kRows, 5}, phase), Waves({kRows, 3}, phase + 5)};
}

inline Batch JoinedBatch(int step, int size) {
  std::vector<torch::Tensor> x;
  std::vector<torch::Tensor> y;
  for (int rank = 0; rank < size; ++rank) {
    Batch batch = BatchOfRank(step, rank);
    x.push_back(batch.x);
    y.push_back(batch.y);
  }
  return {torch::cat(x), torch::cat(y)};
}

inline torch::Tensor Loss(SmallNet& net, const Batch& batch) {
  return torch::mse_loss(net.forward(batch.x), batch.y);
}

// The parameters after `steps` steps of one process that sees the joined batches of `size` ranks.
template <class Optimizer>
std::vector<torch::Tensor> TrainAlone(Optimizer&& make_optimizer, int steps, int size) {
  SmallNet net;
  auto optimizer = make_optimizer(net.parameters());
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    Loss(net, JoinedBatch(step, size)).backward();
    optimizer.step();
  }
  return net.parameters();
}

// Its backward() throws.
struct FailingBackward : torch::autograd::Function<FailingBackward> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("no more memory");
  }
};

// The greatest difference between two lists of tensors, element by element; infinite where one is
// not a number.
inline double Distance(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  double distance = a.size() == b.size() ? 0 : kInfinite;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) {
    const double here = (a[i] - b[i]).abs().max().item<double>();
    distance = std::isnan(here) ? kInfinite : std::max(distance, here);
    if (std::isinf(distance)) break;
  }
  return distance;
}

}  // namespace sirtaki::tests
