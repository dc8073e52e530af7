// Pipelines whose parts share memory, parameters or measurements.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sirtaki/collectives.h"
#include "sirtaki/mesh.h"
#include "sirtaki/pipeline.h"
#include "tests/torch/parallel/pipeline_training.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using pipelines::Model;
using testing::AllOf;
using testing::HasSubstr;
using Tensors = std::vector<torch::Tensor>;

// Autograd gives the same memory to the position's gradient and to the stage before.
struct AddsPositionImpl : torch::nn::Module {
  torch::Tensor position = register_parameter("position", torch::zeros({3, 4}));
  torch::Tensor forward(const torch::Tensor& x) { return x + position.unsqueeze(0); }
};

TEST(PipelineFaultsTest, AGradientThatIsHandedOnIsNoParametersGradient) {
  const torch::Tensor input = torch::ones({2, 3, 4});
  const torch::Tensor target = torch::cat({torch::ones({1, 3, 4}), 5 * torch::ones({1, 3, 4})});
  RunTorchRanks(1, [&](int) {
    const auto scale = [] {
      struct ScaleImpl : torch::nn::Module {
        torch::Tensor weight = register_parameter("weight", torch::ones({4}));
        torch::Tensor forward(const torch::Tensor& x) { return x * weight; }
      };
      return PipelineStage(std::make_shared<ScaleImpl>());
    };
    Pipeline pipeline(
        {scale, [] { return PipelineStage(std::make_shared<AddsPositionImpl>()); }},
        [](const torch::Tensor& output, const torch::Tensor& wanted) {
          return (output * wanted).sum();
        },
        PipelineOptions().micro_batches(2).schedule(
            "rank 0: F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1"));
    pipeline.train_batch(input, target);
    EXPECT_TRUE(torch::equal(pipeline.named_parameters()["0.weight"].grad(),
                             torch::full({4}, 3 * (1 + 5) / 2.0F)))
        << pipeline.named_parameters()["0.weight"].grad();
  });
}

TEST(PipelineFaultsTest, ATensorOverTwoEdgesIsNotChangedByAStageOfTheSameRank) {
  RunTorchRanks(1, [](int) {
    struct OnceImpl : torch::nn::Module {
      torch::Tensor weight = register_parameter("weight", torch::ones({1}));
      Tensors forward(const Tensors& x) {
        const torch::Tensor y = x[0] * weight;
        return {y, y};
      }
    };
    Pipeline pipeline(
        {[] { return PipelineStage(std::make_shared<OnceImpl>()); },
         [] {
           return PipelineStage(
               [](const Tensors& x) { return Tensors{torch::relu_(x[0].mul_(1))}; }, nullptr);
         },
         [] {
           return PipelineStage([](const Tensors& x) { return Tensors{x[0] + 10 * x[1]}; },
                                nullptr);
         }},
        [](const torch::Tensor& output, const torch::Tensor&) { return output.sum(); },
        PipelineOptions().skips({{"far", 0, 2}}).schedule("gpipe"));
    EXPECT_EQ(pipeline.evaluate_batch(-torch::ones({1, 1}), torch::ones({1, 1})), -10);
    EXPECT_EQ(pipeline.train_batch(-torch::ones({1, 1}), torch::ones({1, 1})), -10);
  });
}

TEST(PipelineFaultsTest, ALayerThatIsThereTwiceNeedsATie) {
  RunTorchRanks(2, [](int) {
    torch::nn::Linear shared(4, 4);
    const torch::nn::Sequential net(shared, torch::nn::Tanh(), torch::nn::Tanh(), shared);
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] { Pipeline(net, torch::nn::MSELoss(), PipelineOptions()); }),
                AllOf(HasSubstr("are one in the model and lie in different stages"),
                      HasSubstr("\"0."), HasSubstr("\"3.")));
    Pipeline tied(net, torch::nn::MSELoss(),
                  PipelineOptions().ties({{"0.weight", "3.weight"}, {"0.bias", "3.bias"}}));
    tied.train_batch(torch::ones({2, 4}), torch::ones({2, 4}));
  });
}

TEST(PipelineFaultsTest, AParameterIsTiedOnce) {
  Model model;
  model.stages = 3;
  const auto refused = [&](const PipelineOptions::Ties& ties) {
    RunTorchRanks(3, [&](int) {
      EXPECT_THAT(
          ErrorOf(
              ErrorCode::InvalidArgument,
              [&] { Pipeline(model.Factories(), pipelines::Loss, model.Options().ties(ties)); }),
          HasSubstr("is tied twice"));
    });
  };
  refused({{"0.linear.weight", "1.linear.weight"}, {"1.linear.weight", "2.linear.weight"}});
  refused({{"0.linear.weight", "1.linear.weight", "0.linear.weight"}});
}

TEST(PipelineFaultsTest, OtherFactoriesNamesAndPartitionsAreToldOnAllRanks) {
  const Model model;
  const auto told = [&](const PipelineOptions& on_rank_1, int layers, const std::string& words) {
    RunTorchRanks(2, [&](int rank) {
      Model own = model;
      own.stages = rank == 0 ? 4 : layers;
      const PipelineOptions options = rank == 0 ? model.Options().partition("uniform") : on_rank_1;
      EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                          [&] { Pipeline(own.Factories(), pipelines::Loss, options); }),
                  HasSubstr(words));
      allreduce(torch::ones({1}));  // the job goes on
    });
  };
  told(model.Options().partition("uniform"), 3,
       "4 layers or stages on rank 0; 3 layers or stages on rank 1");
  told(model.Options().partition("uniform").name("other"), 4, "its name is \"other\" on rank 1");
  told(model.Options(), 4, "its partition is");
  told(model.Options().partition("uniform").stages_per_rank(2), 4, "2 stages a rank on rank 1");
}

// Each copy measures that another layer is the slow one.
TEST(PipelineFaultsTest, CopiesAreCutAlikeByTheirTimes) {
  std::vector<std::string> names(4);
  RunTorchRanks(4, [&](int rank) {
    const Mesh grid = mesh({{"data", 2}, {"pipe", 2}});
    const int slow = grid.coordinate("data") == 0 ? 0 : 3;
    std::vector<PipelineFactory> layers;
    for (int i = 0; i < 4; ++i) {
      layers.emplace_back([slow, i] {
        const auto linear = std::make_shared<torch::nn::LinearImpl>(2, 2);
        return PipelineStage(
            [linear, slow, i](const Tensors& x) {
              const auto work = torch::ones({400, 400});
              for (int n = 0; i == slow && n < 20; ++n) torch::mm(work, work);
              return Tensors{linear->forward(x[0])};
            },
            linear);
      });
    }
    const Pipeline pipeline(
        layers, torch::nn::MSELoss(),
        PipelineOptions().mesh(grid).partition("time").sample(torch::ones({1, 2})));
    std::string& all = names[static_cast<std::size_t>(rank)];
    for (const auto& parameter : pipeline.named_parameters()) all += parameter.key() + " ";
  });
  EXPECT_EQ(names[0], names[2]);
  EXPECT_EQ(names[1], names[3]);
}

TEST(PipelineFaultsTest, MeasuringLeavesRunningStatisticsAsTheyAre) {
  RunTorchRanks(2, [](int rank) {
    const torch::nn::Sequential net(torch::nn::BatchNorm1d(3), torch::nn::Linear(3, 3));
    const Pipeline pipeline(net, torch::nn::MSELoss(),
                            PipelineOptions().partition("time").sample(5 * torch::ones({4, 3})));
    if (rank != 0) return;
    EXPECT_EQ(pipeline.named_buffers()["0.num_batches_tracked"].item<int>(), 0);
    EXPECT_TRUE(torch::equal(pipeline.named_buffers()["0.running_mean"], torch::zeros({3})));
  });
}

// Backward passes compute as layers that are kept out of autocast have computed.
TEST(PipelineFaultsTest, BackwardPassesRunWithoutAutocast) {
  RunTorchRanks(1, [](int) {
    bool was_on = true;
    const auto watches = [&was_on](const Tensors& x) {
      x[0].register_hook([&was_on](const torch::Tensor&) {
        was_on = at::autocast::is_autocast_enabled(at::kCPU);
      });
      return Tensors{x[0] * 1};
    };
    Pipeline pipeline({[] { return PipelineStage(torch::nn::Linear(2, 2)); },
                       [&] { return PipelineStage(watches, nullptr); }},
                      torch::nn::MSELoss(), PipelineOptions().schedule("gpipe"));
    at::autocast::set_autocast_enabled(at::kCPU, true);
    pipeline.train_batch(torch::ones({1, 2}), torch::ones({1, 2}));
    EXPECT_FALSE(was_on);
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
    at::autocast::set_autocast_enabled(at::kCPU, false);
  });
}

TEST(PipelineFaultsTest, AVeryLongTimeoutIsNone) {
  const Model model;
  RunTorchRanks(2, [&](int) {
    Pipeline pipeline(model.Factories(), pipelines::Loss,
                      model.Options().timeout(std::chrono::milliseconds::max()));
    pipeline.train_batch(torch::ones({4, model.width}), torch::ones({4, model.width}));
  });
}

TEST(PipelineFaultsTest, WhatClippingThrowsOnOneRankIsToldOnAll) {
  const Model model;
  RunTorchRanks(2, [&](int rank) {
    Pipeline pipeline(model.Factories(), pipelines::Loss,
                      model.Options().timeout(std::chrono::seconds(20)));
    pipeline.train_batch(torch::ones({4, model.width}), torch::ones({4, model.width}));
    torch::optim::SGD optimizer(pipeline.parameters(), 0.1);
    // A norm cannot be taken of whole numbers.
    const torch::Tensor whole = torch::ones({2}, torch::kLong);
    if (rank == 1) {
      whole.mutable_grad() = torch::ones({2}, torch::kLong);
      optimizer.add_param_group(torch::optim::OptimizerParamGroup(Tensors{whole}));
    }
    try {
      pipeline.clip_grad_norm_(optimizer, 1);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::exception& error) {
      if (rank == 0) {
        EXPECT_THAT(error.what(), HasSubstr("on rank 1"));
      }
    }
    allreduce(torch::ones({1}));  // the job goes on
  });
}

TEST(PipelineFaultsTest, TiedParametersKeepTheirGradientsWhenABatchThrows) {
  Model model;
  model.ties = {{"0.linear.weight", "1.linear.weight"}};
  RunTorchRanks(1, [&](int) {
    Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options().schedule("gpipe"));
    pipeline.train_batch(torch::ones({4, model.width}), torch::ones({4, model.width}));
    const torch::Tensor before = pipeline.named_parameters()["0.linear.weight"].grad().clone();
    const torch::Tensor odd = torch::ones({5, model.width});
    EXPECT_THROW(pipeline.train_batch(odd, odd), Error);
    EXPECT_TRUE(torch::equal(pipeline.named_parameters()["0.linear.weight"].grad(), before));
  });
}

}  // namespace
}  // namespace sirtaki::tests
