// The models that are trained, as reference/models.py writes them for torch.distributed.
#pragma once

#include <ATen/Functions.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

#include <cstdint>
#include <string>

namespace sirtaki::benchmarks {

// Layers of 2048 x 2048: 25.2 M parameters if there are six.
inline torch::nn::Sequential MakeMlp(int layers = 6) {
  torch::nn::Sequential model;
  for (int i = 0; i < layers; ++i) {
    model->push_back(torch::nn::Linear(2048, 2048));
    model->push_back(torch::nn::ReLU());
  }
  return model;
}

inline torch::nn::Conv2d MakeConvolution(std::int64_t in, std::int64_t out, std::int64_t kernel,
                                         std::int64_t stride) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

class BasicBlockImpl : public torch::nn::Module {
 public:
  BasicBlockImpl(std::int64_t in, std::int64_t out, std::int64_t stride) {
    first_ = register_module("conv1", MakeConvolution(in, out, 3, stride));
    first_norm_ = register_module("bn1", torch::nn::BatchNorm2d(out));
    second_ = register_module("conv2", MakeConvolution(out, out, 3, 1));
    second_norm_ = register_module("bn2", torch::nn::BatchNorm2d(out));
    if (stride != 1 || in != out) {
      shortcut_ = register_module(
          "downsample",
          torch::nn::Sequential(MakeConvolution(in, out, 1, stride), torch::nn::BatchNorm2d(out)));
    }
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = first_norm_->forward(first_->forward(x)).relu_();
    y = second_norm_->forward(second_->forward(y));
    y += shortcut_ ? shortcut_->forward(x) : x;
    return y.relu_();
  }

 private:
  torch::nn::Conv2d first_{nullptr};
  torch::nn::Conv2d second_{nullptr};
  torch::nn::BatchNorm2d first_norm_{nullptr};
  torch::nn::BatchNorm2d second_norm_{nullptr};
  torch::nn::Sequential shortcut_{nullptr};
};
TORCH_MODULE(BasicBlock);

// 11.7 M parameters.
inline torch::nn::Sequential MakeResNet18() {
  torch::nn::Sequential model(
      MakeConvolution(3, 64, 7, 2), torch::nn::BatchNorm2d(64),
      torch::nn::ReLU(torch::nn::ReLUOptions(true)),
      torch::nn::MaxPool2d(torch::nn::MaxPool2dOptions(3).stride(2).padding(1)));
  std::int64_t in = 64;
  for (int stage = 0; stage < 4; ++stage) {
    const std::int64_t out = std::int64_t{64} << stage;
    for (int block = 0; block < 2; ++block) {
      model->push_back(BasicBlock(in, out, stage > 0 && block == 0 ? 2 : 1));
      in = out;
    }
  }
  model->push_back(torch::nn::AdaptiveAvgPool2d(torch::nn::AdaptiveAvgPool2dOptions(1)));
  model->push_back(torch::nn::Flatten());
  model->push_back(torch::nn::Linear(512, 1000));
  return model;
}

}  // namespace sirtaki::benchmarks
