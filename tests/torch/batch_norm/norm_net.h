// A small convolutional net with batch normalization, and its training on joined and split batches.
#pragma once

#include <torch/torch.h>

#include <vector>

#include "tests/torch/training.h"

namespace sirtaki::tests {

// Deterministic, float64. The same parameters whichever kind of norm is in it.
template <class Norm>
torch::nn::Sequential MakeNormNet(Norm first, Norm second) {
  torch::nn::Sequential net(torch::nn::Conv2d(2, 4, 3), std::move(first), torch::nn::ReLU(),
                            torch::nn::Conv2d(4, 3, 2), std::move(second), torch::nn::Flatten(),
                            torch::nn::Linear(27, 2));
  net->to(torch::kDouble);
  torch::NoGradGuard no_grad;
  double phase = 0;
  for (auto& parameter : net->parameters())
    parameter.copy_(0.5 * Waves(parameter.sizes(), phase += 1));
  return net;
}

inline Batch ImagesOfRank(int step, int rank) {
  constexpr std::int64_t kImages = 3;
  const double phase = 100.0 * step + 10.0 * rank;
  return {Waves({kImages, 2, 6, 6}, phase) * (1.0 + rank) + rank, Waves({kImages, 2}, phase + 5)};
}

inline torch::Tensor NormLoss(torch::nn::Sequential& net, const Batch& batch) {
  return torch::mse_loss(net->forward(batch.x), batch.y);
}

// Parameters and buffers after `steps` steps of one process on the joined batches of `size` ranks.
inline std::vector<torch::Tensor> TrainNormNetAlone(int steps, int size) {
  auto net = MakeNormNet(torch::nn::BatchNorm2d(4), torch::nn::BatchNorm2d(3));
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    std::vector<torch::Tensor> x;
    std::vector<torch::Tensor> y;
    for (int rank = 0; rank < size; ++rank) {
      const Batch batch = ImagesOfRank(step, rank);
      x.push_back(batch.x);
      y.push_back(batch.y);
    }
    NormLoss(net, {torch::cat(x), torch::cat(y)}).backward();
    optimizer.step();
  }
  std::vector<torch::Tensor> all = net->parameters();
  for (const auto& buffer : net->buffers()) all.push_back(buffer.to(torch::kDouble));
  return all;
}

}  // namespace sirtaki::tests
