// ResNet-18 and ResNet-50, built of the same parts under the same names as torchvision's, whose
// ResNet-50 is version 1.5: the stride of a bottleneck is in its 3 x 3 convolution.
#pragma once

#include <torch/nn/functional/pooling.h>
#include <torch/nn/init.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace resnet {

inline torch::nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t kernel,
                                     std::int64_t stride = 1) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

// Both kinds of blocks have convolutions, each with a normalisation, and a way past them.
class BlockImpl : public torch::nn::Module {
 public:
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor y = x;
    for (std::size_t i = 0; i < convolutions_.size(); ++i) {
      y = norms_[i](convolutions_[i](y));
      if (i + 1 < convolutions_.size()) y = y.relu_();
    }
    y += shortcut_ ? shortcut_->forward(x) : x;
    return y.relu_();
  }

 protected:
  void add(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride = 1) {
    const std::string number = std::to_string(convolutions_.size() + 1);
    convolutions_.push_back(register_module("conv" + number, convolution(in, out, kernel, stride)));
    norms_.push_back(register_module("bn" + number, torch::nn::BatchNorm2d(out)));
  }
  void add_shortcut(std::int64_t in, std::int64_t out, std::int64_t stride) {
    if (stride == 1 && in == out) return;
    shortcut_ = register_module("downsample", torch::nn::Sequential(convolution(in, out, 1, stride),
                                                                    torch::nn::BatchNorm2d(out)));
  }

 private:
  std::vector<torch::nn::Conv2d> convolutions_;
  std::vector<torch::nn::BatchNorm2d> norms_;
  torch::nn::Sequential shortcut_{nullptr};
};

class BasicBlockImpl : public BlockImpl {
 public:
  static constexpr std::int64_t kExpansion = 1;
  BasicBlockImpl(std::int64_t in, std::int64_t width, std::int64_t stride) {
    add(in, width, 3, stride);
    add(width, width, 3);
    add_shortcut(in, width, stride);
  }
};
TORCH_MODULE(BasicBlock);

class BottleneckImpl : public BlockImpl {
 public:
  static constexpr std::int64_t kExpansion = 4;
  BottleneckImpl(std::int64_t in, std::int64_t width, std::int64_t stride) {
    add(in, width, 1);
    add(width, width, 3, stride);
    add(width, kExpansion * width, 1);
    add_shortcut(in, kExpansion * width, stride);
  }
};
TORCH_MODULE(Bottleneck);

// Adds the blocks of one resolution; returns the number of features that come out.
template <class Block, class BlockImpl>
std::int64_t add_blocks(torch::nn::SequentialImpl& sequence, std::int64_t in, std::size_t stage,
                        int count) {
  const std::int64_t width = std::int64_t{64} << stage;
  for (int block = 0; block < count; ++block) {
    sequence.push_back(Block(in, width, stage > 0 && block == 0 ? 2 : 1));
    in = BlockImpl::kExpansion * width;
  }
  return in;
}

class ResNetImpl : public torch::nn::Module {
 public:
  // `layers`: 18 or 50. Takes batches of 3 x H x W with H and W of 32 or more, gives the classes'
  // logits.
  ResNetImpl(int layers, std::int64_t classes) {
    conv1_ = register_module("conv1", convolution(3, 64, 7, 2));
    bn1_ = register_module("bn1", torch::nn::BatchNorm2d(64));
    const std::int64_t features = layers == 50
                                      ? add_stages<Bottleneck, BottleneckImpl>({3, 4, 6, 3})
                                      : add_stages<BasicBlock, BasicBlockImpl>({2, 2, 2, 2});
    fc_ = register_module("fc", torch::nn::Linear(features, classes));
    for (const auto& module : modules(/*include_self=*/false)) {
      if (const auto* conv = module->as<torch::nn::Conv2d>()) {
        torch::nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut, torch::kReLU);
      }
    }
  }

  torch::Tensor forward(torch::Tensor x) {
    namespace F = torch::nn::functional;
    x = bn1_(conv1_(x)).relu_();
    x = F::max_pool2d(x, F::MaxPool2dFuncOptions(3).stride(2).padding(1));
    for (auto& stage : stages_) x = stage->forward(x);
    return fc_(x.mean({2, 3}));
  }

 private:
  // Returns the number of features that come out.
  template <class Block, class BlockImpl>
  std::int64_t add_stages(const std::vector<int>& blocks) {
    std::int64_t in = 64;
    for (std::size_t stage = 0; stage < blocks.size(); ++stage) {
      torch::nn::Sequential sequence;
      in = add_blocks<Block, BlockImpl>(*sequence, in, stage, blocks[stage]);
      stages_.push_back(register_module("layer" + std::to_string(stage + 1), sequence));
    }
    return in;
  }

  torch::nn::Conv2d conv1_{nullptr};
  torch::nn::BatchNorm2d bn1_{nullptr};
  std::vector<torch::nn::Sequential> stages_;
  torch::nn::Linear fc_{nullptr};
};
TORCH_MODULE(ResNet);

// A ResNet-50 as a row of layers, which a pipeline can cut.
inline torch::nn::Sequential resnet50_layers(std::int64_t classes) {
  torch::nn::Sequential layers(
      convolution(3, 64, 7, 2), torch::nn::BatchNorm2d(64), torch::nn::ReLU(),
      torch::nn::MaxPool2d(torch::nn::MaxPool2dOptions(3).stride(2).padding(1)));
  std::int64_t features = 64;
  const std::vector<int> blocks = {3, 4, 6, 3};
  for (std::size_t stage = 0; stage < blocks.size(); ++stage) {
    features = add_blocks<Bottleneck, BottleneckImpl>(*layers, features, stage, blocks[stage]);
  }
  layers->push_back(torch::nn::AdaptiveAvgPool2d(1));
  layers->push_back(torch::nn::Flatten());
  layers->push_back(torch::nn::Linear(features, classes));
  return layers;
}

}  // namespace resnet
