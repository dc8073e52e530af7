// The state of a pipeline goes into the unsplit model and back, and into another number of stages; and
// all stages make a step, or none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "sirtaki/grad_scaler.h"
#include "sirtaki/mesh.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/pipeline.h"
#include "sirtaki/tensor_parallel.h"
#include "tests/torch/parallel/pipeline_training.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int kParts = 4;  // of a batch
constexpr int kLinears = 4;

// Layers with parameters, without, and with buffers. Its values are drawn from no generator, which
// ranks that are threads would share.
torch::nn::Sequential StateNet(double value) {
  torch::nn::Sequential net;
  for (int i = 0; i < kLinears; ++i) {
    net->push_back(torch::nn::Linear(5, 5));
    net->push_back(torch::nn::Tanh());
  }
  net->push_back(torch::nn::BatchNorm1d(5));
  torch::NoGradGuard no_grad;
  double at = value;
  for (auto& parameter : net->parameters()) {
    parameter.copy_(torch::arange(parameter.numel()).add(at).sin().view(parameter.sizes()));
    at += 1;
  }
  return net;
}

torch::Tensor StateBatch(int step) {
  return torch::arange(12 * 5).mul(0.37).add(step).sin().view({12, 5});
}

// Weights and biases have learning rates of their own.
template <class Module>
torch::optim::Adam TwoGroups(const Module& module, double lr = 0.01) {
  std::vector<torch::Tensor> matrices;
  std::vector<torch::Tensor> vectors;
  for (const auto& parameter : module.parameters()) {
    (parameter.dim() == 2 ? matrices : vectors).push_back(parameter);
  }
  const auto group = [](std::vector<torch::Tensor> parameters, double rate) {
    return torch::optim::OptimizerParamGroup(std::move(parameters),
                                             std::make_unique<torch::optim::AdamOptions>(rate));
  };
  return torch::optim::Adam({group(std::move(matrices), lr), group(std::move(vectors), 0.03)},
                            torch::optim::AdamOptions(lr));
}

void TrainUnsplit(torch::nn::Sequential net, torch::optim::Optimizer& optimizer, int first,
                  int end) {
  for (int step = first; step < end; ++step) {
    optimizer.zero_grad();
    for (const torch::Tensor& part : StateBatch(step).chunk(kParts)) {
      (torch::mse_loss(net->forward(part), part * 0.5) / kParts).backward();
    }
    optimizer.step();
  }
}

void TrainPipeline(Pipeline& pipeline, torch::optim::Optimizer& optimizer, int first, int end) {
  for (int step = first; step < end; ++step) {
    optimizer.zero_grad();
    pipeline.train_batch(StateBatch(step), StateBatch(step) * 0.5);
    optimizer.step();
  }
}

PipelineOptions InParts() { return PipelineOptions().micro_batches(kParts); }

// The bytes that a program would write into its two files.
struct SavedState {
  std::string model;
  std::string optimizer;
};

std::string BytesOf(torch::serialize::OutputArchive& archive) {
  std::ostringstream bytes;
  archive.save_to(bytes);
  return bytes.str();
}

torch::serialize::InputArchive ArchiveOf(const std::string& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  return archive;
}

SavedState StateOfUnsplit(const torch::nn::Sequential& net,
                          const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive model;
  torch::serialize::OutputArchive state;
  net->save(model);
  optimizer.save(state);
  return {BytesOf(model), BytesOf(state)};
}

void ExpectEqualModules(const torch::nn::Module& found, const torch::nn::Module& expected) {
  const auto compare = [](const auto& some, const auto& all) {
    for (const auto& item : some) {
      EXPECT_TRUE(torch::equal(item.value(), all[item.key()])) << item.key();
    }
  };
  compare(found.named_parameters(), expected.named_parameters());
  compare(found.named_buffers(), expected.named_buffers());
}

void ExpectCloseModules(const torch::nn::Module& found, const torch::nn::Module& expected) {
  for (const auto& item : found.named_parameters()) {
    EXPECT_TRUE(torch::allclose(item.value(), expected.named_parameters()[item.key()], 1e-5, 1e-6))
        << item.key();
  }
}

// Goes on from the state in a pipeline of that many ranks, and gives what rank `root` saves.
SavedState ThroughPipeline(const SavedState& state, int ranks, int root, int first, int end) {
  SavedState saved;
  RunTorchRanks(ranks, [&](int rank) {
    Pipeline pipeline(StateNet(9), torch::nn::MSELoss(), InParts());
    torch::optim::Adam adam = TwoGroups(pipeline, 0.5);  // the state has other options
    auto model = ArchiveOf(state.model);
    pipeline.load_full(model);
    auto optimizer = ArchiveOf(state.optimizer);
    pipeline.load_full_optimizer(adam, optimizer);
    TrainPipeline(pipeline, adam, first, end);
    torch::serialize::OutputArchive whole;
    torch::serialize::OutputArchive whole_optimizer;
    pipeline.save_full(whole, root);
    pipeline.save_full_optimizer(adam, whole_optimizer, root);
    // The optimizer goes on as if nothing had been saved.
    EXPECT_EQ(adam.state().size(), pipeline.parameters().size());
    if (rank == root) saved = {BytesOf(whole), BytesOf(whole_optimizer)};
  });
  return saved;
}

TEST(PipelineStateTest, ItGoesThroughAnyNumberOfStagesAndTheUnsplitModelToTheBit) {
  const torch::nn::Sequential reference = StateNet(0);
  torch::optim::Adam reference_adam = TwoGroups(*reference);
  TrainUnsplit(reference, reference_adam, 0, 2);
  SavedState state = StateOfUnsplit(reference, reference_adam);

  state = ThroughPipeline(state, 2, 1, 2, 4);
  torch::nn::Sequential net = StateNet(5);
  torch::optim::Adam adam = TwoGroups(*net, 0.5);
  auto model = ArchiveOf(state.model);
  net->load(model);
  auto optimizer = ArchiveOf(state.optimizer);
  adam.load(optimizer);
  TrainUnsplit(reference, reference_adam, 2, 4);
  ExpectEqualModules(*net, *reference);
  EXPECT_EQ(adam.param_groups()[0].options().get_lr(), 0.01);
  TrainUnsplit(net, adam, 4, 6);
  TrainUnsplit(reference, reference_adam, 4, 6);
  ExpectEqualModules(*net, *reference);

  state = ThroughPipeline(StateOfUnsplit(net, adam), 3, 0, 6, 8);
  state = ThroughPipeline(state, 4, 2, 8, 10);
  TrainUnsplit(reference, reference_adam, 6, 10);
  torch::nn::Sequential last = StateNet(7);
  auto last_model = ArchiveOf(state.model);
  last->load(last_model);
  ExpectEqualModules(*last, *reference);
}

TEST(PipelineStateTest, ShardsOfCopiesAreMadeWholeAndTrainingGoesOn) {
  const torch::nn::Sequential reference = StateNet(0);
  torch::optim::Adam reference_adam = TwoGroups(*reference);
  TrainUnsplit(reference, reference_adam, 0, 3);
  SavedState saved;
  RunTorchRanks(4, [&](int rank) {
    const Mesh grid = mesh({{"data", 2}, {"pipe", 2}});
    Pipeline pipeline(StateNet(0), torch::nn::MSELoss(), InParts().mesh(grid));
    auto adam = DistributedOptimizer(TwoGroups(pipeline), pipeline.named_parameters(),
                                     pipeline.optimizer_options().shard(Shard::OptimizerState));
    TrainPipeline(pipeline, adam, 0, 2);
    torch::serialize::OutputArchive model;
    torch::serialize::OutputArchive state;
    pipeline.save_full(model);
    pipeline.save_full_optimizer(adam, state);
    if (rank == 0) saved = {BytesOf(model), BytesOf(state)};
    TrainPipeline(pipeline, adam, 2, 3);  // both copies have the same batches
    ExpectCloseModules(pipeline, *reference);
    // Into an optimizer that has shards of another state.
    auto model_again = ArchiveOf(BytesOf(model));
    pipeline.load_full(model_again);
    auto state_again = ArchiveOf(BytesOf(state));
    pipeline.load_full_optimizer(adam, state_again);
    TrainPipeline(pipeline, adam, 2, 3);
    ExpectCloseModules(pipeline, *reference);
  });
  torch::nn::Sequential net = StateNet(5);
  torch::optim::Adam adam = TwoGroups(*net);
  auto model = ArchiveOf(saved.model);
  net->load(model);
  auto state = ArchiveOf(saved.optimizer);
  adam.load(state);
  TrainUnsplit(net, adam, 2, 3);
  ExpectCloseModules(*net, *reference);
}

TEST(PipelineStateTest, TheStateOfATiedParameterGoesToAllItsStages) {
  torch::nn::Sequential net;  // has one layer twice
  const torch::nn::Linear twice(5, 5);
  net->push_back(twice);
  net->push_back(torch::nn::Linear(5, 5));
  net->push_back(torch::nn::Linear(5, 5));
  net->push_back(twice);
  torch::optim::Adam whole(net->parameters(), torch::optim::AdamOptions(0.01));
  TrainUnsplit(net, whole, 0, 1);
  const SavedState state = StateOfUnsplit(net, whole);
  RunTorchRanks(2, [&](int) {
    std::vector<PipelineFactory> layers(4, [] { return PipelineStage(torch::nn::Linear(5, 5)); });
    Pipeline pipeline(
        layers, torch::nn::MSELoss(),
        InParts().partition("uniform").ties({{"0.weight", "3.weight"}, {"0.bias", "3.bias"}}));
    torch::optim::Adam adam(pipeline.parameters(), torch::optim::AdamOptions(0.01));
    auto optimizer = ArchiveOf(state.optimizer);
    pipeline.load_full_optimizer(adam, optimizer);
    const std::string name = pipeline.is_first() ? "0.weight" : "3.weight";
    const auto& found = adam.state().at(pipeline.named_parameters()[name].unsafeGetTensorImpl());
    const auto& expected = whole.state().at(twice->weight.unsafeGetTensorImpl());
    EXPECT_TRUE(
        torch::equal(static_cast<const torch::optim::AdamParamState&>(*found).exp_avg(),
                     static_cast<const torch::optim::AdamParamState&>(*expected).exp_avg()));
  });
}

TEST(PipelineStateTest, WhatDoesNotFitIsToldOnAllRanks) {
  const torch::nn::Sequential one(torch::nn::Linear(5, 5));
  torch::optim::Adam small({one->parameters()[0]}, torch::optim::AdamOptions(0.1));
  const SavedState state = StateOfUnsplit(one, small);
  RunTorchRanks(2, [&](int rank) {
    Pipeline pipeline(StateNet(9), torch::nn::MSELoss(), InParts());
    const auto fails = [&](ErrorCode code, torch::optim::Optimizer& optimizer) {
      return ErrorOf(code, [&] {
        torch::serialize::OutputArchive archive;
        pipeline.save_full_optimizer(optimizer, archive);
      });
    };
    torch::optim::SGD other_rate(pipeline.parameters(), rank == 0 ? 0.1 : 0.2);
    EXPECT_THAT(fails(ErrorCode::Mismatch, other_rate),
                AllOf(HasSubstr("save_full_optimizer"), HasSubstr("0.1"), HasSubstr("0.2")));
    torch::optim::SGD of_others({torch::ones(1)}, 0.1);
    EXPECT_THAT(fails(ErrorCode::InvalidArgument, of_others),
                HasSubstr("1 parameters that are not the pipeline's"));
    torch::optim::LBFGS lbfgs(pipeline.parameters(), 0.1);
    EXPECT_THAT(fails(ErrorCode::InvalidArgument, lbfgs), HasSubstr("LBFGS"));

    torch::optim::Adam adam(pipeline.parameters(), torch::optim::AdamOptions(0.1));
    TrainPipeline(pipeline, adam, 0, 1);
    const auto before = torch::nn::utils::parameters_to_vector(pipeline.parameters()).clone();
    const std::size_t states = adam.state().size();
    ErrorOf(ErrorCode::InvalidArgument, [&] {
      auto archive = ArchiveOf(state.optimizer);
      pipeline.load_full_optimizer(adam, archive);
    });
    EXPECT_EQ(adam.state().size(), states);
    const std::string lacking = pipeline.is_first() ? "\"2.weight\"" : "\"6.weight\"";
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          auto archive = ArchiveOf(state.model);
                          pipeline.load_full(archive);
                        }),
                HasSubstr("the state has no " + lacking));
    EXPECT_TRUE(
        torch::equal(torch::nn::utils::parameters_to_vector(pipeline.parameters()), before));
  });
}

TEST(PipelineStateTest, SplitLayersAreSavedWholeAndTakeTheirParts) {
  const auto value = [](int layer, const at::Tensor& whole) {
    return torch::arange(whole.numel()).add(100.0 * layer).view(whole.sizes());
  };
  std::string saved;
  RunTorchRanks(4, [&](int rank) {
    const Mesh grid = mesh({{"pipe", 2}, {"tensor", 2}});
    const std::vector<PipelineFactory> layers(2, [&] {
      return PipelineStage(ColumnParallelLinear(
          ColumnParallelLinearOptions(3, 3).gather_output(true).process_set(grid.set("tensor"))));
    });
    Pipeline pipeline(layers, torch::nn::MSELoss(), InParts().mesh(grid));
    const int layer = pipeline.stages().front();
    for (const auto& parameter : pipeline.parameters()) {
      fill_whole(parameter, [&](torch::Tensor whole) { whole.copy_(value(layer, whole)); });
    }
    torch::serialize::OutputArchive archive;
    pipeline.save_full(archive);
    if (rank == 3) saved = BytesOf(archive);
    for (const auto& parameter : pipeline.parameters()) {
      fill_whole(parameter, [](torch::Tensor whole) { whole.zero_(); });
    }
    auto whole_model = ArchiveOf(BytesOf(archive));
    pipeline.load_full(whole_model);
    for (const auto& parameter : pipeline.parameters()) {
      const torch::Tensor whole = whole_of(parameter);
      EXPECT_TRUE(torch::equal(whole, value(layer, whole)));
    }
    torch::optim::SGD optimizer(pipeline.parameters(), 0.1);
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] { pipeline.save_full_optimizer(optimizer, archive); }),
                HasSubstr("is a part of a parameter that is split over ranks"));
  });
  torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
  auto archive = ArchiveOf(saved);
  net->load(archive);
  for (int layer = 0; layer < 2; ++layer) {
    for (const auto& parameter : net->ptr(static_cast<std::size_t>(layer))->parameters()) {
      EXPECT_TRUE(torch::equal(parameter, value(layer, parameter)));
    }
  }
}

// An infinite gradient in one stage of one copy keeps all of them from the step.
TEST(PipelineStateTest, AllStagesMakeAStepOrNone) {
  for (const bool has_copies : {false, true}) {
    RunTorchRanks(4, [&](int rank) {
      const Mesh grid = mesh({{"data", has_copies ? 2 : 1}, {"pipe", has_copies ? 2 : 4}});
      Pipeline pipeline(StateNet(0), torch::nn::MSELoss(), InParts().mesh(grid));
      auto optimizer =
          DistributedOptimizer(torch::optim::SGD(pipeline.parameters(), 0.1),
                               pipeline.named_parameters(), pipeline.optimizer_options());
      GradScaler scaler(GradScalerOptions().init_scale(8));
      torch::Tensor mine = pipeline.parameters()[0];
      double factor = 1;
      mine.register_hook([&factor](const torch::Tensor& gradient) { return gradient * factor; });
      for (int step = 0; step < 3; ++step) {
        factor = step == 1 && rank == 1 ? std::numeric_limits<double>::infinity() : 1.0;
        const torch::Tensor before = mine.detach().clone();
        optimizer.zero_grad();
        pipeline.train_batch(StateBatch(step), StateBatch(step) * 0.5);
        EXPECT_EQ(scaler.step(optimizer), step != 1) << "step " << step << " on rank " << rank;
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), step < 1 ? 8 : 4) << "step " << step << " on rank " << rank;
        EXPECT_EQ(torch::equal(before, mine), step == 1) << "step " << step << " on rank " << rank;
      }
    });
  }
}

// Tags that no pipeline has any more are used again, also those above the tags of one that is there.
TEST(PipelineStateTest, PipelinesAreMadeAgainAndAgain) {
  RunTorchRanks(2, [](int) {
    const auto made = [](int micro_batches) {
      return std::make_unique<Pipeline>(StateNet(0), torch::nn::MSELoss(),
                                        PipelineOptions().micro_batches(micro_batches));
    };
    const torch::Tensor batch = torch::ones({1000, 5});
    double first = 0;
    std::unique_ptr<Pipeline> pipeline;
    for (int i = 0; i < 40; ++i) {
      pipeline = made(500);  // while the one before is there: 1001 tags each
      if (i % 13 != 0) continue;
      const double loss = pipeline->evaluate_batch(batch, batch);
      if (i == 0) first = loss;
      EXPECT_EQ(loss, first);
    }
    const auto large = made(2000);
    const std::string text = ErrorOf(ErrorCode::InvalidArgument, [&] {
      std::vector<std::unique_ptr<Pipeline>> all;
      for (int i = 0; i < 8; ++i) all.push_back(made(2000));
    });
    EXPECT_THAT(text, AllOf(HasSubstr("needs 4001 tags"), HasSubstr("of 32001 in a row"),
                            HasSubstr("destroy pipelines")));
  });
}

}  // namespace
}  // namespace sirtaki::tests
