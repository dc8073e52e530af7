// RANKS: 2 4
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/torch/parallel/pipeline_training.h"

namespace sirtaki::tests {
namespace {

using pipelines::Model;
using pipelines::Whole;

// Trains as one process does that runs the same micro-batches, to the bit.
void ExpectTrainsAsOneProcess(const Model& model, const PipelineOptions& options) {
  const Whole whole(model);
  torch::optim::SGD alone(whole.parameters(), 0.1);
  Pipeline pipeline(model.Factories(), pipelines::Loss, options);
  torch::optim::SGD optimizer(pipeline.parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    alone.zero_grad();
    optimizer.zero_grad();
    const auto input = model.Input(step);
    const auto target = model.Target(step);
    const double loss = whole.Train(input, target);
    EXPECT_EQ(pipeline.train_batch(pipeline.is_first() ? input : torch::Tensor(),
                                   pipeline.is_last() ? target : torch::Tensor()),
              loss);
    for (const auto& parameter : pipeline.named_parameters()) {
      EXPECT_TRUE(torch::equal(parameter.value().grad(), whole.Parameter(parameter.key()).grad()))
          << parameter.key() << " in batch " << step;
    }
    alone.step();
    optimizer.step();
  }
}

TEST(PipelineMpiTest, EachScheduleTrainsAsOneProcess) {
  init(InitOptions().deterministic(true));
  for (const bool recomputes : {false, true}) {
    for (const char* schedule : {"gpipe", "1f1b", "interleaved_1f1b"}) {
      SCOPED_TRACE(schedule);
      Model model;
      model.stages = size() * (std::string(schedule) == "interleaved_1f1b" ? 2 : 1);
      model.skips = {{"far", 0, model.stages - 1}};
      model.ties = {{"0.linear.weight", std::to_string(model.stages - 1) + ".linear.weight"}};
      model.drops = true;
      PipelineOptions options = model.Options().schedule(schedule);
      if (recomputes) options.recompute({0, model.stages - 1});
      ExpectTrainsAsOneProcess(model, options);
    }
  }
  shutdown();
}

// A stage that draws from the process's generator, as most do.
struct DropsImpl : torch::nn::Module {
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(6, 6));
  int runs = 0;
  torch::Tensor forward(const torch::Tensor& input) {
    ++runs;
    return torch::tanh(torch::dropout(linear->forward(input), 0.5, is_training()));
  }
};

TEST(PipelineMpiTest, RecomputedStagesFindTheirRandomNumbersAgain) {
  init();
  std::vector<torch::Tensor> gradients[2];
  for (const int recomputes : {0, 1}) {
    torch::manual_seed(7);
    std::shared_ptr<DropsImpl> stage;
    std::vector<PipelineFactory> factories(static_cast<std::size_t>(size()), [&stage] {
      stage = std::make_shared<DropsImpl>();
      return PipelineStage(stage);
    });
    std::vector<int> recomputed;
    for (int i = 0; recomputes == 1 && i < size(); ++i) recomputed.push_back(i);
    Pipeline pipeline(factories, torch::nn::MSELoss(),
                      PipelineOptions().micro_batches(4).recompute(recomputed));
    torch::manual_seed(static_cast<std::uint64_t>(rank()));
    const auto batch = torch::ones({8, 6});
    pipeline.train_batch(batch, batch);
    EXPECT_EQ(stage->runs, recomputes == 1 ? 8 : 4);
    for (const auto& parameter : pipeline.parameters()) {
      gradients[recomputes].push_back(parameter.grad());
    }
  }
  for (std::size_t i = 0; i < gradients[0].size(); ++i) {
    EXPECT_TRUE(torch::equal(gradients[0][i], gradients[1][i])) << i;
  }
  shutdown();
}

}  // namespace
}  // namespace sirtaki::tests
