#include "sirtaki/pipeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "sirtaki/mesh.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/session.h"
#include "tests/support/pipeline_simulation.h"
#include "tests/support/test_scale.h"
#include "tests/torch/parallel/pipeline_training.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using pipelines::Model;
using pipelines::Whole;
using testing::AllOf;
using testing::HasSubstr;

core::Config Exact() {
  core::Config config;
  config.deterministic = true;
  return config;
}

// Trains some batches and compares losses, gradients and parameters with those of one process, to the
// bit.
void ExpectEqualTraining(const Model& model, int ranks, const PipelineOptions& options) {
  constexpr int kBatches = 3;
  const Whole whole(model);
  torch::optim::SGD sgd(whole.parameters(), 0.1);
  std::vector<double> losses;
  std::vector<std::map<std::string, torch::Tensor>> gradients;
  std::vector<std::string> names;
  for (int stage = 0; stage < model.stages; ++stage) {
    for (const char* of : {".linear.weight", ".linear.bias"}) {
      names.push_back(std::to_string(stage) + of);
    }
  }
  // Threads that make stages at the same time draw from one generator.
  std::map<std::string, torch::Tensor> start;
  for (const std::string& name : names) start[name] = whole.Parameter(name).detach().clone();
  for (int step = 0; step < kBatches; ++step) {
    sgd.zero_grad();
    losses.push_back(whole.Train(model.Input(step), model.Target(step)));
    gradients.emplace_back();
    for (const std::string& name : names) {
      gradients.back()[name] = whole.Parameter(name).grad().clone();
    }
    sgd.step();
  }
  const double evaluated = whole.Evaluate(model.Input(9), model.Target(9));
  // Random numbers are the process's, and ranks are threads here.
  std::vector<torch::Tensor> inputs;
  std::vector<torch::Tensor> targets;
  for (const int step : {0, 1, 2, 9}) {
    inputs.push_back(model.Input(step));
    targets.push_back(model.Target(step));
  }
  RunTorchRanks(
      ranks,
      [&](int) {
        Pipeline pipeline(model.Factories(), pipelines::Loss, options);
        torch::NoGradGuard no_grad;
        for (auto& parameter : pipeline.named_parameters()) {
          parameter.value().copy_(start.at(parameter.key()));
        }
        torch::optim::SGD optimizer(pipeline.parameters(), 0.1);
        const auto given = [&](const std::vector<torch::Tensor>& of, bool here, std::size_t i) {
          return here ? of[i] : torch::Tensor();
        };
        for (std::size_t step = 0; step < kBatches; ++step) {
          optimizer.zero_grad();
          const double loss = pipeline.train_batch(given(inputs, pipeline.is_first(), step),
                                                   given(targets, pipeline.is_last(), step));
          EXPECT_EQ(loss, losses[step]) << step;
          for (const auto& parameter : pipeline.named_parameters()) {
            EXPECT_TRUE(torch::equal(parameter.value().grad(), gradients[step].at(parameter.key())))
                << parameter.key() << " in batch " << step << "\n"
                << pipeline.report().schedule;
          }
          EXPECT_EQ(pipeline.report().most_kept, pipeline.report().peak_activations);
          optimizer.step();
        }
        EXPECT_EQ(pipeline.evaluate_batch(given(inputs, pipeline.is_first(), 3),
                                          given(targets, pipeline.is_last(), 3)),
                  evaluated);
      },
      Exact());
}

TEST(PipelineTest, EachScheduleGivesTheGradientsOfOneProcess) {
  for (const int ranks : {1, 2, 4}) {
    for (const char* schedule : {"gpipe", "1f1b", "interleaved_1f1b"}) {
      SCOPED_TRACE(std::string(schedule) + " on " + std::to_string(ranks));
      Model model;
      model.stages = ranks * (std::string(schedule) == "1f1b" ? 1 : 2);
      ExpectEqualTraining(model, ranks, model.Options().schedule(schedule));
    }
  }
}

TEST(PipelineTest, SkipsAndTiesGiveTheGradientsOfOneProcess) {
  Model model;
  model.stages = 4;
  model.skips = {{"far", 0, 3}, {"far", 0, 2}, {"mask", 1, 3}};
  model.ties = {{"0.linear.weight", "3.linear.weight"}};
  ExpectEqualTraining(model, 4, model.Options());
  ExpectEqualTraining(model, 2, model.Options().schedule("interleaved_1f1b"));
  ExpectEqualTraining(model, 2, model.Options().schedule("gpipe").placing({0, 1, 1, 0}));
  ExpectEqualTraining(model, 1, model.Options().schedule("gpipe"));
}

TEST(PipelineTest, AScheduleOfOnesOwnRuns) {
  Model model;
  model.micro_batches = 2;
  ExpectEqualTraining(model, 2,
                      model.Options().schedule("rank 0: F0.1 F0.0 B0.0 B0.1\n"
                                               "rank 1: F1.1 F1.0 B1.0 B1.1\n"));
}

}  // namespace
}  // namespace sirtaki::tests
