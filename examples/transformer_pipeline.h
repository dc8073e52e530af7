// The net of train_transformer as a pipeline: its layers in stages, each stage on one rank, or on the
// ranks that share its layers.
#pragma once

#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transformer.h"
#include "transformer_settings.h"

namespace transformer {

// Some of the net's modules, under the names that they have there.
struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(const torch::OrderedDict<std::string, std::shared_ptr<Module>>& modules) {
    for (const auto& module : modules) register_module(module.key(), module.value());
  }
};

inline sirtaki::PipelineFactory layer_of(
    const torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>& modules,
    const std::function<torch::Tensor(const torch::Tensor&)>& forward) {
  const auto module = std::make_shared<LayerImpl>(modules);
  return [=] {
    return sirtaki::PipelineStage(
        [=](const std::vector<torch::Tensor>& in) { return std::vector{forward(in.front())}; },
        module);
  };
}

// All ranks have drawn the same net, and keep the layers of their stage: the letters and their places,
// the blocks, and the logits, which have the matrix of the letters once more.
inline std::unique_ptr<sirtaki::Pipeline> pipeline_of(const Gpt& gpt, const Settings& settings,
                                                      const sirtaki::Mesh& mesh) {
  using Modules = torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>;
  const auto letters = gpt->letters;
  const auto places = gpt->places;
  const auto norm = gpt->norm;
  std::vector<sirtaki::PipelineFactory> layers;
  layers.push_back(
      layer_of(Modules{{"letters", letters.ptr()}, {"places", places.ptr()}},
               [letters = letters, places = places](const torch::Tensor& text) mutable {
                 return letters(text) + places(torch::arange(text.size(1), text.device()));
               }));
  for (const Block& block : gpt->blocks) {
    const std::string name = "block" + std::to_string(layers.size() - 1);
    layers.push_back(layer_of(Modules{{name, block.ptr()}},
                              [block, recompute = gpt->recompute](const torch::Tensor& x) {
                                return run_block(block, x, recompute);
                              }));
  }
  layers.push_back(layer_of(Modules{{"norm", norm.ptr()}, {"letters", letters.ptr()}},
                            [letters = letters, norm = norm](const torch::Tensor& x) mutable {
                              return letters->logits(norm(x));
                            }));
  const std::string last = std::to_string(layers.size() - 1);
  return std::make_unique<sirtaki::Pipeline>(
      layers, gpt->loss,
      sirtaki::PipelineOptions()
          .mesh(mesh)
          .partition("parameters")
          .micro_batches(static_cast<int>(settings.micro_batches))
          .ties({{"0.letters.weight", last + ".letters.weight"}}));
}

}  // namespace transformer
