// Adasum of what steps change, as a naive procedure in one process.
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tests/torch/training.h"

namespace sirtaki::tests {

inline torch::Tensor AdasumOfTwo(const torch::Tensor& a, const torch::Tensor& b) {
  const double dot = (a * b).sum().item<double>();
  const double a2 = (a * a).sum().item<double>();
  const double b2 = (b * b).sum().item<double>();
  return (a2 > 0 ? 1 - dot / (2 * a2) : 1) * a + (b2 > 0 ? 1 - dot / (2 * b2) : 1) * b;
}

// Those beyond the greatest power of two are folded into the first ones; then neighbours meet.
inline torch::Tensor NaiveAdasum(std::vector<torch::Tensor> of_rank) {
  std::size_t power = 1;
  while (2 * power <= of_rank.size()) power *= 2;
  for (std::size_t i = power; i < of_rank.size(); ++i) {
    of_rank[i - power] = AdasumOfTwo(of_rank[i - power], of_rank[i]);
  }
  of_rank.resize(power);
  while (of_rank.size() > 1) {
    std::vector<torch::Tensor> half;
    for (std::size_t i = 0; i < of_rank.size(); i += 2) {
      half.push_back(AdasumOfTwo(of_rank[i], of_rank[i + 1]));
    }
    of_rank = std::move(half);
  }
  return of_rank.front();
}

// The parameters after `steps` steps of `size` ranks: each makes its own step with its own state,
// from common weights, and what the steps have changed is combined parameter by parameter.
template <class MakeOptimizer>
std::vector<torch::Tensor> TrainByAdasum(const MakeOptimizer& make_optimizer, int steps, int size) {
  using Optimizer = decltype(make_optimizer(std::vector<torch::Tensor>()));
  std::vector<std::unique_ptr<SmallNet>> nets;
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  for (int rank = 0; rank < size; ++rank) {
    nets.push_back(std::make_unique<SmallNet>());
    optimizers.push_back(std::make_unique<Optimizer>(make_optimizer(nets.back()->parameters())));
  }
  for (int step = 0; step < steps; ++step) {
    std::vector<torch::Tensor> start;
    for (const auto& parameter : nets[0]->parameters()) start.push_back(parameter.detach().clone());
    for (int rank = 0; rank < size; ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      optimizers[at]->zero_grad();
      Loss(*nets[at], BatchOfRank(step, rank)).backward();
      optimizers[at]->step();
    }
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < start.size(); ++i) {
      std::vector<torch::Tensor> deltas;
      for (const auto& net : nets) deltas.push_back(net->parameters()[i] - start[i]);
      const auto combined = start[i] + NaiveAdasum(deltas);
      for (const auto& net : nets) net->parameters()[i].copy_(combined);
    }
  }
  return nets[0]->parameters();
}

}  // namespace sirtaki::tests
