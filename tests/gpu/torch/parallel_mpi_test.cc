// RANKS: 2
// Pipelines and split layers on real GPUs, of which there may be fewer than ranks, against the
// unsplit models. Skips with a reason where there is no GPU.
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/torch/gpu_rank.h"
#include "tests/torch/parallel/pipeline_training.h"

namespace sirtaki::tests {
namespace {

class GpuParallelTest : public GpuRankTest {
 protected:
  static double Far(const torch::Tensor& a, const torch::Tensor& b) {
    EXPECT_EQ(a.sizes(), b.sizes());
    if (a.sizes() != b.sizes() || a.numel() == 0) return 0;
    return (a.detach().cpu().to(torch::kDouble) - b.detach().cpu().to(torch::kDouble))
        .abs()
        .max()
        .item<double>();
  }
  // Whether a part's gradient is that part of the whole's.
  static void ExpectPart(const torch::Tensor& parameter, const torch::Tensor& whole_gradient) {
    EXPECT_LT(Far(parameter.grad(), is_split(parameter) ? detail::PartFor(parameter, whole_gradient)
                                                        : whole_gradient),
              1e-10);
  }
};

// ---- pipelines ----

// Trains as one process on the CPU does that runs the same micro-batches.
void TrainPipeline(const pipelines::Model& model, const PipelineOptions& options,
                   const torch::Device& device) {
  const pipelines::Whole whole(model);
  torch::optim::SGD alone(whole.parameters(), 0.1);
  Pipeline pipeline(model.Factories(), pipelines::Loss, options);
  pipeline.to(device);
  torch::optim::SGD optimizer(pipeline.parameters(), 0.1);
  for (int step = 0; step < 5; ++step) {
    alone.zero_grad();
    optimizer.zero_grad();
    const auto input = model.Input(step);
    const auto target = model.Target(step);
    const double loss = whole.Train(input, target);
    EXPECT_NEAR(pipeline.train_batch(pipeline.is_first() ? input.to(device) : torch::Tensor(),
                                     pipeline.is_last() ? target.to(device) : torch::Tensor()),
                loss, 1e-5);
    for (const auto& parameter : pipeline.named_parameters()) {
      EXPECT_TRUE(torch::allclose(parameter.value().grad().cpu(),
                                  whole.Parameter(parameter.key()).grad(), 1e-3, 1e-5))
          << parameter.key() << " in batch " << step;
    }
    std::vector<torch::Tensor> once = whole.parameters();
    for (const auto& tie : model.ties) {
      std::erase_if(once, [&](const torch::Tensor& parameter) {
        return parameter.is_same(whole.Parameter(tie.back()));
      });
    }
    EXPECT_NEAR(pipeline.clip_grad_norm_(optimizer, 0.5),
                torch::nn::utils::clip_grad_norm_(once, 0.5), 1e-4);
    alone.step();
    optimizer.step();
    if (!model.ties.empty()) break;
  }
}

TEST_F(GpuParallelTest, EachScheduleTrainsAsOneProcess) {
  for (const bool ties : {false, true}) {
    for (const bool recomputes : {false, true}) {
      for (const char* schedule : {"gpipe", "1f1b", "interleaved_1f1b"}) {
        SCOPED_TRACE(schedule);
        pipelines::Model model;
        model.width = 64;
        model.stages = size() * (std::string(schedule) == "interleaved_1f1b" ? 2 : 1);
        model.skips = {{"far", 0, model.stages - 1}};
        if (ties) {
          model.ties = {{"0.linear.weight", std::to_string(model.stages - 1) + ".linear.weight"}};
        }
        PipelineOptions options = model.Options().schedule(schedule);
        if (recomputes) options.recompute({0, model.stages - 1});
        TrainPipeline(model, options, device());
      }
    }
  }
}

// A stage that is still busy on the GPU when the host has long handed its activations over.
struct BusyImpl : torch::nn::Module {
  explicit BusyImpl(const torch::Device& device) {
    linear->to(device);
    torch::NoGradGuard no_grad;
    linear->weight.mul_(0.5);
  }
  torch::Tensor forward(const torch::Tensor& input) {
    torch::Tensor x = input;
    for (int i = 0; i < 12; ++i) x = torch::tanh(linear->forward(x)) + x;
    return torch::dropout(x, 0.5, is_training());
  }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(1024, 1024));
};

// Returns the gradients of the last of three steps; the host waits for the GPU after each if told to.
std::vector<torch::Tensor> TrainBusy(const torch::Device& device, bool recomputes, bool waits) {
  torch::manual_seed(7);
  const std::vector<PipelineFactory> factories(static_cast<std::size_t>(size()), [&device] {
    return PipelineStage(std::make_shared<BusyImpl>(device));
  });
  std::vector<int> recomputed;
  for (int i = 0; recomputes && i < size(); ++i) recomputed.push_back(i);
  Pipeline pipeline(factories, torch::nn::MSELoss(),
                    PipelineOptions().micro_batches(6).recompute(recomputed));
  torch::optim::SGD optimizer(pipeline.parameters(), 0.01);
  torch::manual_seed(static_cast<std::uint64_t>(rank()));
  const auto batch = torch::ones({6 * 512, 1024}, device);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    pipeline.train_batch(batch, batch);
    if (waits) torch::cuda::synchronize();
    optimizer.step();
  }
  std::vector<torch::Tensor> found;
  for (const auto& parameter : pipeline.parameters()) found.push_back(parameter.grad().cpu());
  return found;
}

TEST_F(GpuParallelTest, ABusyGpuSpoilsNoActivations) {
  const auto expected = TrainBusy(device(), /*recomputes=*/false, /*waits=*/true);
  for (const bool recomputes : {false, true}) {
    const auto found = TrainBusy(device(), recomputes, /*waits=*/false);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_GT(expected[i].abs().max().item<double>(), 0);
      EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-4, 1e-7))
          << i << (recomputes ? " recomputed" : "");
    }
  }
}

// ---- split layers ----

TEST_F(GpuParallelTest, LinearLayersComputeWhatTheUnsplitOnesDo) {
  for (const bool gathers : {false, true}) {
    torch::manual_seed(5);
    torch::nn::Linear expand(6, 24);
    torch::nn::Linear contract(24, 5);
    torch::manual_seed(5);
    ColumnParallelLinear column(ColumnParallelLinearOptions(6, 24).gather_output(gathers));
    RowParallelLinear row(RowParallelLinearOptions(24, 5).input_is_parallel(!gathers));
    for (torch::nn::Module* module :
         std::vector<torch::nn::Module*>{expand.get(), contract.get(), column.get(), row.get()}) {
      module->to(device(), torch::kDouble);
    }
    for (int step = 0; step < 3; ++step) {
      for (torch::nn::Module* module :
           std::vector<torch::nn::Module*>{expand.get(), contract.get(), column.get(), row.get()}) {
        module->zero_grad();
      }
      torch::manual_seed(static_cast<std::uint64_t>(20 + step));
      const torch::Tensor x = torch::randn({3, 4, 6}, torch::kDouble).to(device());
      const torch::Tensor of_whole = x.clone().requires_grad_();
      const torch::Tensor of_parts = x.clone().requires_grad_();
      const torch::Tensor expected = contract(torch::tanh(expand(of_whole)));
      const torch::Tensor found = row(torch::tanh(column(of_parts)));
      EXPECT_LT(Far(found, expected), 1e-12);
      expected.sin().sum().backward();
      found.sin().sum().backward();
      EXPECT_LT(Far(of_parts.grad(), of_whole.grad()), 1e-10);
      ExpectPart(column->weight, expand->weight.grad());
      ExpectPart(row->weight, contract->weight.grad());
      ExpectPart(column->bias, expand->bias.grad());
      ExpectPart(row->bias, contract->bias.grad());
    }
    EXPECT_LT(Far(whole_of(column->weight), expand->weight), 1e-15);
  }
}

TEST_F(GpuParallelTest, EmbeddingAndCrossEntropyComputeWhatTheUnsplitOnesDo) {
  constexpr std::int64_t kWords = 21;
  torch::manual_seed(6);
  torch::nn::Embedding words(torch::nn::EmbeddingOptions(kWords, 8).padding_idx(3));
  torch::manual_seed(6);
  ParallelEmbedding parts(ParallelEmbeddingOptions(kWords, 8).padding_idx(3));
  words->to(device(), torch::kDouble);
  parts->to(device(), torch::kDouble);
  ParallelCrossEntropy loss(ParallelCrossEntropyOptions(kWords).label_smoothing(0.1));
  const torch::Tensor ids = (torch::arange(30).reshape({5, 6}) * 7 % kWords).to(device());
  const torch::Tensor targets = ids.roll(1);
  const torch::Tensor expected = torch::nn::functional::cross_entropy(
      torch::linear(words(ids), words->weight).flatten(0, 1), targets.flatten(),
      torch::nn::functional::CrossEntropyFuncOptions().label_smoothing(0.1));
  const torch::Tensor found = loss(parts->logits(parts(ids)), targets);
  EXPECT_NEAR(found.item<double>(), expected.item<double>(), 1e-12);
  expected.backward();
  found.backward();
  ExpectPart(parts->weight, words->weight.grad());
}

}  // namespace
}  // namespace sirtaki::tests
