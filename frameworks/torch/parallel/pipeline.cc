#include "sirtaki/pipeline.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/text.h"
#include "frameworks/torch/parallel/pipeline_state.h"
#include "frameworks/torch/tensors/generators.h"
#include "frameworks/torch/tensors/throw.h"
#include "parallel/partition.h"
#include "sirtaki/detail/gradient_reducer.h"

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

double ParametersOf(const PipelineStage& layer) {
  double count = 0;
  if (!layer.module()) return count;
  for (const at::Tensor& parameter : layer.module()->parameters()) {
    count += static_cast<double>(parameter.numel());
  }
  return count;
}

// Buffers of a layer that stays are what they were: running statistics, for instance.
detail::Scope BuffersAgain(const std::shared_ptr<torch::nn::Module>& module) {
  std::vector<std::pair<at::Tensor, at::Tensor>> kept;
  for (const at::Tensor& buffer : module ? module->buffers() : std::vector<at::Tensor>()) {
    if (buffer.defined()) kept.emplace_back(buffer, buffer.detach().clone());
  }
  return detail::Scope([kept = std::move(kept)] {
    const at::NoGradGuard no_grad;
    for (const auto& [buffer, before] : kept) buffer.copy_(before);
  });
}

// The time when the device has done what it was given.
std::chrono::steady_clock::time_point Now(const at::Device& device) {
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
  return std::chrono::steady_clock::now();
}

// The shortest of some forward and backward passes, in seconds. Gives what the layer returns.
double TimeOf(const PipelineStage& layer, const at::Device& device,
              std::vector<at::Tensor>* tensors) {
  constexpr int kRuns = 3;
  const detail::Scope buffers_again = BuffersAgain(layer.module());
  double shortest = 0;
  std::vector<at::Tensor> outputs;
  for (int run = 0; run < kRuns; ++run) {
    std::vector<at::Tensor> inputs;
    for (const at::Tensor& tensor : *tensors) {
      inputs.push_back(tensor.detach().clone());
      if (inputs.back().is_floating_point()) inputs.back().requires_grad_(true);
      inputs.back() = inputs.back().clone();  // no leaf: a layer may change it in place
    }
    const auto begin = Now(device);
    outputs = layer.forward()(inputs);
    for (const at::Tensor& output : outputs) {
      if (output.requires_grad()) output.backward(at::ones_like(output), /*retain_graph=*/true);
    }
    const std::chrono::duration<double> took = Now(device) - begin;
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
    detail::ThrowInvalid(
        "the partition \"time\" needs the inputs of a micro-batch; "
        "give PipelineOptions a sample");
  }
  const at::Device device = options.sample().defined() ? options.sample().device() : at::kCPU;
  // Layers that are made to be weighed draw random numbers, which the layers that stay are to draw again.
  const detail::Scope again([before = detail::GeneratorStates(
                                 detail::GeneratorsInUse())]() mutable { before.PutInForce(); });
  const at::AutoGradMode with_graph(true);
  std::vector<at::Tensor> tensors = {options.sample()};
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const PipelineStage layer = layers[i]();
    weights[i] =
        kind == PartitionKind::kTime ? TimeOf(layer, device, &tensors) : ParametersOf(layer);
  }
  return weights;
}

// The names of parameters that several layers of the model share.
std::vector<std::vector<std::string>> TwinsOf(const torch::nn::Sequential& model) {
  std::map<const void*, std::vector<std::string>> names;
  for (std::size_t i = 0; i < model->size(); ++i) {
    for (const auto& parameter : model->ptr(i)->named_parameters()) {
      names[parameter.value().unsafeGetTensorImpl()].push_back(std::to_string(i) + "." +
                                                               parameter.key());
    }
  }
  std::vector<std::vector<std::string>> twins;
  for (auto& [parameter, of] : names) {
    if (of.size() > 1) twins.push_back(std::move(of));
  }
  return twins;
}

// Each rank would train its own copy of a parameter that stages share, and nothing would notice.
void RefuseUntied(const std::vector<std::string>& names, const std::vector<int>& begins,
                  const PipelineOptions& options) {
  const auto stages_of = [&](const std::vector<std::string>& of) {
    std::set<std::ptrdiff_t> stages;
    for (const std::string& name : of) {
      stages.insert(std::upper_bound(begins.begin(), begins.end(), std::stoi(name)) -
                    begins.begin());
    }
    return stages;
  };
  const auto stages = stages_of(names);
  if (stages.size() < 2) return;
  for (const std::vector<std::string>& tie : options.ties()) {
    std::vector<std::string> tied;
    for (const std::string& name : names) {
      if (std::find(tie.begin(), tie.end(), name) != tie.end()) tied.push_back(name);
    }
    if (stages_of(tied) == stages) return;
  }
  detail::ThrowInvalid(
      "the parameters " + core::Quoted(names.front()) + " and " + core::Quoted(names.back()) +
      " are one in the model and lie in different stages; give PipelineOptions the ties "
      "between them");
}

}  // namespace

Pipeline::Pipeline(const torch::nn::Sequential& model, const PipelineLoss& loss,
                   const PipelineOptions& options)
    : Pipeline(
          LayersOf(model), TwinsOf(model), loss,
          options.partition().empty() ? PipelineOptions(options).partition("uniform") : options) {}

Pipeline::Pipeline(const std::vector<PipelineFactory>& factories, const PipelineLoss& loss,
                   const PipelineOptions& options)
    : Pipeline(factories, {}, loss, options) {}

Pipeline::Pipeline(const std::vector<PipelineFactory>& factories, const Twins& twins,
                   const PipelineLoss& loss, const PipelineOptions& options) {
  const std::vector<int> begins = detail::PipelineCore::Cut(
      options, static_cast<int>(factories.size()), [&] { return Weigh(factories, options); });
  const auto make = [&](int stage) {
    for (const std::vector<std::string>& names : twins) RefuseUntied(names, begins, options);
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

void Pipeline::save_full(torch::serialize::OutputArchive& archive, int root_rank) const {
  core_->SaveFull(*this, archive, root_rank);
}

void Pipeline::load_full(torch::serialize::InputArchive& archive) {
  detail::LoadFullModel(*this, archive);
}

void Pipeline::save_full_optimizer(torch::optim::Optimizer& optimizer,
                                   torch::serialize::OutputArchive& archive, int root_rank) const {
  core_->SaveFullOptimizer(optimizer, archive, root_rank);
}

void Pipeline::load_full_optimizer(torch::optim::Optimizer& optimizer,
                                   torch::serialize::InputArchive& archive) {
  core_->LoadFullOptimizer(optimizer, archive);
}

double Pipeline::clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                                 double norm_type, bool error_if_nonfinite) {
  return core_->ClipGradNorm({&optimizer}, max_norm, norm_type, error_if_nonfinite);
}

double Pipeline::clip_grad_norm_(const std::vector<torch::optim::Optimizer*>& optimizers,
                                 double max_norm, double norm_type, bool error_if_nonfinite) {
  return core_->ClipGradNorm(optimizers, max_norm, norm_type, error_if_nonfinite);
}

std::shared_ptr<torch::nn::Module> Pipeline::clone(const std::optional<at::Device>&) const {
  detail::ThrowStatus(core::Status(
      core::StatusCode::kUnsupported,
      "clone() of a pipeline: a copy would be another pipeline, which all ranks make; copy its "
      "parameters() for an average of them, or save it by save_full()"));
}

}  // namespace sirtaki
