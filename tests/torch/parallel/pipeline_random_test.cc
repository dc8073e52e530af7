// Random schedules over random skip connections run with real tensors, and give the gradients of one
// process. A failure prints its seed; SIRTAKI_TEST_SEED runs that one first.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "parallel/schedule_text.h"
#include "sirtaki/pipeline.h"
#include "tests/support/pipeline_simulation.h"
#include "tests/support/test_scale.h"
#include "tests/torch/parallel/pipeline_training.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using pipelines::Whole;

// The whole model's gradients and loss for one batch.
struct Expected {
  explicit Expected(const pipelines::Model& model)
      : input(model.Input()), target(model.Target()), whole(model) {
    loss = whole.Train(input, target);
  }
  torch::Tensor input;
  torch::Tensor target;
  Whole whole;
  double loss = 0;
};

void RunOne(std::uint64_t seed) {
  Random random(seed);
  parallel::PipelineShape shape = RandomShape(random);
  shape.training = true;
  for (parallel::Tie& tie : shape.ties) {
    tie.name = std::to_string(tie.stages.front()) + ".linear.weight";
  }
  // A parameter is tied once.
  std::vector<parallel::Tie> ties;
  std::vector<bool> tied(static_cast<std::size_t>(shape.stages));
  for (const parallel::Tie& tie : shape.ties) {
    const auto is_tied = [&](int stage) { return tied[static_cast<std::size_t>(stage)]; };
    if (std::any_of(tie.stages.begin(), tie.stages.end(), is_tied)) continue;
    for (const int stage : tie.stages) tied[static_cast<std::size_t>(stage)] = true;
    ties.push_back(tie);
  }
  shape.ties = ties;
  pipelines::Model model;
  model.stages = shape.stages;
  model.micro_batches = shape.micro_batches;
  for (const parallel::Edge& skip : shape.skips) {
    model.skips.push_back({skip.name, skip.from, skip.to});
  }
  for (const parallel::Tie& tie : shape.ties) {
    auto& names = model.ties.emplace_back();
    for (const int stage : tie.stages) names.push_back(std::to_string(stage) + ".linear.weight");
  }
  const std::string text = parallel::Text(RandomSchedule(shape, random));
  SCOPED_TRACE("SIRTAKI_TEST_SEED=" + std::to_string(seed) + "\n" + text);
  const Expected expected(model);
  RunTorchRanks(shape.ranks, [&](int) {
    // Not by recompute(), which keeps the state of the process's generator: ranks are threads here.
    Pipeline pipeline(model.Factories(), pipelines::Loss,
                      model.Options().schedule(text).placing(shape.rank_of_stage));
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : pipeline.named_parameters()) {
        parameter.value().copy_(expected.whole.Parameter(parameter.key()));
      }
    }
    const double loss =
        pipeline.train_batch(pipeline.is_first() ? expected.input : torch::Tensor(),
                             pipeline.is_last() ? expected.target : torch::Tensor());
    EXPECT_NEAR(loss, expected.loss, 1e-6);
    for (const auto& parameter : pipeline.named_parameters()) {
      EXPECT_TRUE(torch::allclose(parameter.value().grad(),
                                  expected.whole.Parameter(parameter.key()).grad(), 1e-4, 1e-5))
          << parameter.key();
    }
    EXPECT_EQ(pipeline.report().most_kept, pipeline.report().peak_activations);
  });
}

TEST(RandomPipelineTest, EachScheduleEndsWithTheGradientsOfOneProcess) {
  const std::uint64_t seed = TestSeed();
  const int count = ScaledCount(40, 1000);
  for (int i = 0; i < count && !testing::Test::HasFailure(); ++i) {
    RunOne(seed + static_cast<std::uint64_t>(i));
  }
}

}  // namespace
}  // namespace sirtaki::tests
