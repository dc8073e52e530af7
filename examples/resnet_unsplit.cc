// Trains a ResNet-50 on made-up images, by micro-batches:
//
//   resnet_unsplit --steps 10
//
// resnet_pipeline.cc is the same program for two ranks.

#include <torch/torch.h>

#include <cstdio>

#include "pipeline_settings.h"
#include "resnet.h"

int main(int argc, char** argv) {
  const auto settings = examples::MicroBatchSettings().parse(argc, argv);
  torch::manual_seed(1);
  const torch::Tensor classes = torch::arange(settings.batch_size) % 4;
  const torch::Tensor images =
      torch::randn({settings.batch_size, 3, settings.image_size, settings.image_size}) +
      classes.view({-1, 1, 1, 1});
  torch::nn::CrossEntropyLoss loss_of;
  torch::nn::Sequential layers = resnet::resnet50_layers(1000);
  torch::optim::SGD optimizer(layers->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  for (int step = 1; step <= settings.steps; ++step) {
    optimizer.zero_grad();
    double loss = 0;
    const auto some = images.chunk(settings.micro_batches);
    const auto wanted = classes.chunk(settings.micro_batches);
    for (std::size_t i = 0; i < some.size(); ++i) {
      const torch::Tensor part = loss_of(layers->forward(some[i]), wanted[i]) / some.size();
      part.backward();
      loss += part.item<double>();
    }
    optimizer.step();
    std::printf("step %d: loss %.5f\n", step, loss);
  }
}
