#include "sirtaki/pipeline.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/base/text.h"
#include "frameworks/torch/tensors/throw.h"
#include "parallel/partition.h"

namespace sirtaki {
namespace {

using Layers = std::vector<PipelineFactory>;
using parallel::PartitionKind;

PartitionKind KindOf(const PipelineOptions& options) {
  PartitionKind kind = PartitionKind::kUniform;
  if (!options.partition().empty()) {
    detail::ThrowIfError(parallel::ParsePartitionKind(options.partition(), &kind));
  }
  return kind;
}

Layers LayersOf(const torch::nn::Sequential& model) {
  Layers layers;
  for (const torch::nn::AnyModule& layer : *model) {
    layers.emplace_back([layer] { return PipelineStage(layer); });
  }
  return layers;
}

// Layers that are made to be weighed draw random numbers, which the layers that stay are to draw again.
class RandomNumbersAgain {
 public:
  RandomNumbersAgain() : generator_(at::globalContext().defaultGenerator(at::kCPU)) {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  ~RandomNumbersAgain() {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(state_);
  }
  RandomNumbersAgain(const RandomNumbersAgain&) = delete;
  RandomNumbersAgain& operator=(const RandomNumbersAgain&) = delete;

 private:
  at::Generator generator_;
  at::Tensor state_;
};

double ParametersOf(const PipelineStage& layer) {
  double count = 0;
  if (!layer.module()) return count;
  for (const at::Tensor& parameter : layer.module()->parameters()) {
    count += static_cast<double>(parameter.numel());
  }
  return count;
}

// The shortest of some forward and backward passes, in seconds. Gives what the layer returns.
double TimeOf(const PipelineStage& layer, std::vector<at::Tensor>* tensors) {
  constexpr int kRuns = 3;
  double shortest = 0;
  std::vector<at::Tensor> outputs;
  for (int run = 0; run < kRuns; ++run) {
    std::vector<at::Tensor> inputs;
    for (const at::Tensor& tensor : *tensors) {
      inputs.push_back(tensor.detach().clone());
      if (inputs.back().is_floating_point()) inputs.back().requires_grad_(true);
      inputs.back() = inputs.back().clone();  // no leaf: a layer may change it in place
    }
    const auto begin = std::chrono::steady_clock::now();
    outputs = layer.forward()(inputs);
    for (const at::Tensor& output : outputs) {
      if (output.requires_grad()) output.backward(at::ones_like(output), /*retain_graph=*/true);
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    shortest = run == 0 ? took.count() : std::min(shortest, took.count());
  }
  if (layer.module()) layer.module()->zero_grad();
  tensors->clear();
  for (const at::Tensor& output : outputs) tensors->push_back(output.detach());
  return shortest;
}

// One layer is there at a time.
std::vector<double> Weigh(const Layers& layers, const PipelineOptions& options) {
  const PartitionKind kind = KindOf(options);
  std::vector<double> weights(layers.size(), 1);
  if (kind == PartitionKind::kUniform) return weights;
  if (kind == PartitionKind::kTime && !options.sample().defined()) {
    detail::ThrowStatus(core::Status(core::StatusCode::kInvalidArgument,
                                     "the partition \"time\" needs the inputs of a micro-batch; "
                                     "give PipelineOptions a sample"));
  }
  const RandomNumbersAgain again;
  const at::AutoGradMode with_graph(true);
  std::vector<at::Tensor> tensors = {options.sample()};
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const PipelineStage layer = layers[i]();
    weights[i] = kind == PartitionKind::kTime ? TimeOf(layer, &tensors) : ParametersOf(layer);
  }
  return weights;
}

}  // namespace

Pipeline::Pipeline(const torch::nn::Sequential& model, const PipelineLoss& loss,
                   const PipelineOptions& options)
    : Pipeline(
          LayersOf(model), loss,
          options.partition().empty() ? PipelineOptions(options).partition("uniform") : options) {}

Pipeline::Pipeline(const std::vector<PipelineFactory>& factories, const PipelineLoss& loss,
                   const PipelineOptions& options) {
  std::vector<int> begins(factories.size());
  std::iota(begins.begin(), begins.end(), 0);
  if (!options.partition().empty()) {
    begins = detail::PipelineCore::Cut(options, [&] { return Weigh(factories, options); });
  }
  const auto make = [&](int stage) {
    const auto place = static_cast<std::size_t>(stage);
    const std::size_t end =
        place + 1 < begins.size() ? static_cast<std::size_t>(begins[place + 1]) : factories.size();
    detail::PipelineCore::Stage made;
    std::vector<PipelineStage::Function> layers;
    for (auto i = static_cast<std::size_t>(begins[place]); i < end; ++i) {
      const PipelineStage layer = factories[i]();
      layers.push_back(layer.forward());
      if (!layer.module()) continue;
      const std::string name = std::to_string(i);
      register_module(name, layer.module());
      for (const auto& parameter : layer.module()->named_parameters()) {
        made.parameters.emplace_back(name + "." + parameter.key(), parameter.value());
      }
    }
    made.forward = [layers](const Tensors& inputs) {
      Tensors tensors = inputs;
      for (const PipelineStage::Function& layer : layers) tensors = layer(tensors);
      return tensors;
    };
    return made;
  };
  core_ = std::make_unique<detail::PipelineCore>(options, begins, make, loss.function());
}

double Pipeline::train_batch(const at::Tensor& input, const at::Tensor& target) {
  return train_batch(input.defined() ? Tensors{input} : Tensors(),
                     target.defined() ? Tensors{target} : Tensors());
}

double Pipeline::train_batch(const Tensors& inputs, const Tensors& targets) {
  return core_->TrainBatch(inputs, targets);
}

double Pipeline::evaluate_batch(const at::Tensor& input, const at::Tensor& target) {
  return evaluate_batch(input.defined() ? Tensors{input} : Tensors(),
                        target.defined() ? Tensors{target} : Tensors());
}

double Pipeline::evaluate_batch(const Tensors& inputs, const Tensors& targets, Tensors* outputs) {
  return core_->EvaluateBatch(inputs, targets, outputs);
}

double Pipeline::clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                                 double norm_type, bool error_if_nonfinite) {
  return core_->ClipGradNorm(optimizer, max_norm, norm_type, error_if_nonfinite);
}

}  // namespace sirtaki
