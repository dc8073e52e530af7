// Pipelines and the same models in one process, which runs the same micro-batches by accumulation.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sirtaki/pipeline.h"

namespace sirtaki::tests::pipelines {

using Tensors = std::vector<torch::Tensor>;

// A stage with a linear layer. It takes one tensor and those of skip connections, which it adds, and
// returns one, and one for each skip connection that it has.
struct StageImpl : torch::nn::Module {
  StageImpl(int number, int width, int skips_out, bool drops_some)
      : skips(skips_out), drops(drops_some), seed(100 + number) {
    torch::manual_seed(static_cast<std::uint64_t>(number));
    linear = register_module("linear", torch::nn::Linear(width, width));
  }
  Tensors forward(const Tensors& inputs) {
    torch::Tensor x = linear->forward(inputs.front());
    for (std::size_t i = 1; i < inputs.size(); ++i) x = x + inputs[i].sin();
    if (drops) {
      torch::manual_seed(static_cast<std::uint64_t>(seed));
      x = torch::dropout(x, 0.5, is_training());
    }
    Tensors outputs = {torch::tanh(x)};
    for (int i = 0; i < skips; ++i) outputs.push_back(x.sin() * (1.0 + i));
    return outputs;
  }
  torch::nn::Linear linear{nullptr};
  int skips;
  bool drops;
  int seed;
};

struct Model {
  int stages = 2;
  int width = 5;
  int micro_batches = 4;
  std::vector<PipelineSkip> skips;
  PipelineOptions::Ties ties;
  bool drops = false;

  int SkipsFrom(int stage) const {
    std::vector<std::string> names;
    for (const PipelineSkip& skip : skips) {
      if (skip.from != stage) continue;
      if (std::find(names.begin(), names.end(), skip.name) == names.end()) {
        names.push_back(skip.name);
      }
    }
    return static_cast<int>(names.size());
  }
  std::shared_ptr<StageImpl> Make(int stage) const {
    return std::make_shared<StageImpl>(stage, width, SkipsFrom(stage), drops);
  }
  std::vector<PipelineFactory> Factories() const {
    std::vector<PipelineFactory> factories;
    for (int stage = 0; stage < stages; ++stage) {
      factories.emplace_back([model = *this, stage] { return PipelineStage(model.Make(stage)); });
    }
    return factories;
  }
  PipelineOptions Options() const {
    return PipelineOptions().micro_batches(micro_batches).skips(skips).ties(ties);
  }
  torch::Tensor Input(int step = 0) const {
    torch::manual_seed(static_cast<std::uint64_t>(1000 + step));
    return torch::randn({3 * micro_batches, width});
  }
  torch::Tensor Target(int step = 0) const {
    torch::manual_seed(static_cast<std::uint64_t>(2000 + step));
    return torch::randn({3 * micro_batches, width});
  }
};

inline torch::Tensor Loss(const torch::Tensor& output, const torch::Tensor& target) {
  return torch::mse_loss(output, target);
}

// The unsplit model, in one process.
class Whole {
 public:
  explicit Whole(const Model& model) : model_(model) {
    for (int stage = 0; stage < model.stages; ++stage) stages_.push_back(model.Make(stage));
    torch::NoGradGuard no_grad;
    for (const auto& tie : model.ties) {
      for (const std::string& name : tie) Parameter(name).copy_(Parameter(tie.front()));
    }
  }
  torch::Tensor Parameter(const std::string& name) const {
    const std::size_t dot = name.find('.');
    const auto stage = static_cast<std::size_t>(std::stoi(name.substr(0, dot)));
    return stages_[stage]->named_parameters()[name.substr(dot + 1)];
  }
  std::vector<torch::Tensor> parameters() const {
    std::vector<torch::Tensor> all;
    for (const auto& stage : stages_) {
      for (const auto& parameter : stage->parameters()) all.push_back(parameter);
    }
    return all;
  }
  torch::Tensor Forward(const torch::Tensor& input) const {
    torch::Tensor x = input;
    std::map<std::pair<std::string, int>, torch::Tensor> handed;  // name and the stage it is for
    for (int stage = 0; stage < model_.stages; ++stage) {
      Tensors inputs = {x};
      for (const PipelineSkip& skip : model_.skips) {
        if (skip.to == stage) inputs.push_back(handed.at({skip.name, skip.from}));
      }
      const Tensors outputs = stages_[static_cast<std::size_t>(stage)]->forward(inputs);
      x = outputs.front();
      std::size_t next = 1;
      for (const PipelineSkip& skip : model_.skips) {
        if (skip.from != stage || handed.count({skip.name, stage}) != 0) continue;
        handed[{skip.name, stage}] = outputs[next++];
      }
    }
    return x;
  }
  // Adds up the gradients of the micro-batches; gives the mean loss. Tied parameters have the sum of
  // their stages' gradients in each of them.
  double Train(const torch::Tensor& input, const torch::Tensor& target) const {
    double sum = 0;
    const auto inputs = input.chunk(model_.micro_batches);
    const auto targets = target.chunk(model_.micro_batches);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const torch::Tensor loss = Loss(Forward(inputs[i]), targets[i]);
      (loss / model_.micro_batches).backward();
      sum += loss.item<double>();
    }
    torch::NoGradGuard no_grad;
    for (const auto& tie : model_.ties) {
      torch::Tensor all;
      for (const std::string& name : tie) {
        const torch::Tensor gradient = Parameter(name).grad();
        all = all.defined() ? all + gradient : gradient.clone();
      }
      for (const std::string& name : tie) Parameter(name).mutable_grad() = all.clone();
    }
    return sum / model_.micro_batches;
  }
  double Evaluate(const torch::Tensor& input, const torch::Tensor& target) const {
    torch::NoGradGuard no_grad;
    double sum = 0;
    const auto inputs = input.chunk(model_.micro_batches);
    const auto targets = target.chunk(model_.micro_batches);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      sum += Loss(Forward(inputs[i]), targets[i]).item<double>();
    }
    return sum / model_.micro_batches;
  }

 private:
  const Model model_;
  std::vector<std::shared_ptr<StageImpl>> stages_;
};

}  // namespace sirtaki::tests::pipelines
