// Trains two layers with Adam, by accumulation:
//
//   two_layers_unsplit --steps 100
//
// two_layers_pipeline.cc is the same program for two ranks.

#include <torch/torch.h>

#include <cstdio>

#include "pipeline_settings.h"

int main(int argc, char** argv) {
  const auto settings = examples::MicroBatchSettings{64, 64, 8, 100}.parse(argc, argv);
  torch::manual_seed(1);
  torch::nn::Sequential layers(torch::nn::Linear(16, 128), torch::nn::ReLU(),
                               torch::nn::Linear(128, 4));
  torch::nn::MSELoss loss_of;
  torch::optim::Adam optimizer(layers->parameters(), 0.01);
  for (int step = 1; step <= settings.steps; ++step) {
    const torch::Tensor inputs = torch::randn({settings.batch_size, 16});
    const torch::Tensor targets = inputs.view({-1, 4, 4}).square().mean(2);
    optimizer.zero_grad();
    double loss = 0;
    const auto some = inputs.chunk(settings.micro_batches);
    const auto wanted = targets.chunk(settings.micro_batches);
    for (std::size_t i = 0; i < some.size(); ++i) {
      const torch::Tensor part = loss_of(layers->forward(some[i]), wanted[i]) / some.size();
      part.backward();
      loss += part.item<double>();
    }
    optimizer.step();
    if (step % 20 == 0) std::printf("step %d: loss %.5f\n", step, loss);
  }
}
