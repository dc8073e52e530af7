// Trains two layers with Adam, by accumulation:
//
//   sirtakirun -np 2 two_layers_pipeline --steps 100
//
// two_layers_unsplit.cc is the same program for one process.

#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <cstdio>

#include "pipeline_settings.h"

int main(int argc, char** argv) {
  sirtaki::init(argc, argv);
  const auto settings = examples::MicroBatchSettings{64, 64, 8, 100}.parse(argc, argv);
  torch::manual_seed(1);
  torch::nn::Sequential layers(torch::nn::Linear(16, 128), torch::nn::ReLU(),
                               torch::nn::Linear(128, 4));
  torch::nn::MSELoss loss_of;
  const auto options = sirtaki::PipelineOptions().micro_batches(settings.micro_batches);
  sirtaki::Pipeline model(layers, loss_of, options);
  torch::optim::Adam optimizer(model.parameters(), 0.01);
  for (int step = 1; step <= settings.steps; ++step) {
    const torch::Tensor inputs = torch::randn({settings.batch_size, 16});
    const torch::Tensor targets = inputs.view({-1, 4, 4}).square().mean(2);
    optimizer.zero_grad();
    const double loss = model.train_batch(inputs, targets);
    optimizer.step();
    if (model.is_last() && step % 20 == 0) std::printf("step %d: loss %.5f\n", step, loss);
  }
  sirtaki::shutdown();
}
