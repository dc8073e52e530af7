// Trains a ResNet-50 on made-up images, by micro-batches:
//
//   sirtakirun -np 2 resnet_pipeline --steps 10
//
// resnet_unsplit.cc is the same program for one process.

#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <cstdio>

#include "pipeline_settings.h"
#include "resnet.h"

int main(int argc, char** argv) {
  sirtaki::init(argc, argv);
  const auto settings = examples::MicroBatchSettings().parse(argc, argv);
  torch::manual_seed(1);
  const torch::Tensor classes = torch::arange(settings.batch_size) % 4;
  const torch::Tensor images =
      torch::randn({settings.batch_size, 3, settings.image_size, settings.image_size}) +
      classes.view({-1, 1, 1, 1});
  torch::nn::CrossEntropyLoss loss_of;
  torch::nn::Sequential layers = resnet::resnet50_layers(1000);
  auto options = sirtaki::PipelineOptions().micro_batches(settings.micro_batches);
  sirtaki::Pipeline model(layers, loss_of, options.partition("parameters"));
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  for (int step = 1; step <= settings.steps; ++step) {
    optimizer.zero_grad();
    const double loss = model.train_batch(images, classes);
    optimizer.step();
    if (model.is_last()) std::printf("step %d: loss %.5f\n", step, loss);
  }
  sirtaki::shutdown();
}
