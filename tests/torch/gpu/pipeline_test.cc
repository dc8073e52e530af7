// Pipelines whose tensors lie on GPUs, which are fakes: where they arrive, and which random numbers are
// drawn.
#include "sirtaki/pipeline.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sirtaki/messages.h"
#include "sirtaki/recompute.h"
#include "tests/torch/gpu/gpu_ranks.h"

namespace sirtaki::tests {
namespace {

using ::testing::Each;

using Tensors = std::vector<at::Tensor>;

class GpuPipelineTest : public GpuRanksTest {};

// A module with one parameter.
struct OneParameter : torch::nn::Module {
  explicit OneParameter(const at::Tensor& value) : w(register_parameter("w", value)) {}
  at::Tensor w;
};

// The stage on GPU 1 hands over what it has taken to GPU 5, and gets the gradient there; the one behind
// it computes on the CPU.
TEST_F(GpuPipelineTest, TensorsArriveWhereTheStageIsAndGradientsWhereTheTensorWas) {
  RunRanks(2, [](GpuRank& rank) {
    const std::vector<PipelineFactory> factories = {
        [] {
          at::Tensor start = at::empty({4}, at::TensorOptions().device(Cuda(1)));
          const auto module = std::make_shared<OneParameter>(start.zero_());
          return PipelineStage(
              [module](const Tensors&) -> Tensors { return {module->w.to(Cuda(5))}; }, module);
        },
        [] {
          const auto module = std::make_shared<OneParameter>(torch::full({4}, 3.0F));
          const auto forward = [module](const Tensors& inputs) -> Tensors {
            EXPECT_TRUE(inputs[0].is_cpu());
            return {inputs[0].cpu() * module->w};
          };
          return PipelineStage(forward, module);
        }};
    const auto loss = [](const at::Tensor& output, const at::Tensor&) { return output.sum(); };
    Pipeline pipeline(factories, PipelineLoss(loss), PipelineOptions().micro_batches(2));
    const at::Tensor batch = torch::ones({2});
    EXPECT_EQ(pipeline.train_batch(batch, batch), 0);
    if (!pipeline.is_first()) return;
    // Half the weight of each of the two micro-batches.
    EXPECT_THAT(rank.Read(pipeline.parameters()[0].grad()), Each(3.0F));
  });
}

// What stages hand over, forward and backward, goes from GPU to GPU by NCCL where it is large.
TEST_F(GpuPipelineTest, LargeTensorsGoByNccl) {
  constexpr std::int64_t kCount = 65536;
  RunRanks(2, [this](GpuRank& rank) {
    const auto on = [&rank](std::int64_t count) {
      at::Tensor made = at::empty({count}, at::TensorOptions().device(Cuda(rank.device())));
      return std::make_shared<OneParameter>(made.zero_());
    };
    const std::vector<PipelineFactory> factories = {
        [&] {
          const auto module = on(kCount);
          // Another tensor, as what a stage computes is one.
          return PipelineStage(
              [module](const Tensors&) -> Tensors { return {module->w.cpu().to(Cuda(1))}; },
              module);
        },
        [&] {
          const auto module = on(1);
          const auto forward = [](const Tensors& inputs) -> Tensors {
            EXPECT_EQ(inputs[0].device(), Cuda(2));
            return {inputs[0].cpu() * 3};
          };
          return PipelineStage(forward, module);
        }};
    const auto loss = [](const at::Tensor& output, const at::Tensor&) { return output.sum(); };
    Pipeline pipeline(factories, PipelineLoss(loss), PipelineOptions().micro_batches(1));
    const at::Tensor batch = torch::ones({1});
    // Each direction has a greeting, and then a message at least.
    for (bool is_over = false; !is_over;) {
      if (pipeline.is_first()) pipeline.parameters()[0].mutable_grad() = at::Tensor();
      EXPECT_EQ(pipeline.train_batch(batch, batch), 0);
      if (pipeline.is_first()) {
        EXPECT_THAT(rank.Read(pipeline.parameters()[0].grad()), Each(3.0F));
        std::map<std::string, int> sends;  // by direction, each of which has a stream of its own
        for (const std::string& call : gpus_.calls("ncclSend")) ++sends[call];
        is_over = sends.size() == 2 && std::ranges::all_of(sends, [](const auto& direction) {
                    return direction.second >= 2;
                  });
        send(torch::full({1}, is_over ? 1.0 : 0.0), 1);
      } else {
        is_over = recv_(torch::zeros({1}), 0).item<float>() > 0;
      }
    }
  });
}

// Draws from a GPU's own generator, which is on the host here.
at::Tensor DrawOn(int gpu) {
  at::Generator generator = at::globalContext().defaultGenerator(Cuda(gpu));
  return torch::empty({8}).uniform_(0, 1, generator);
}

TEST_F(GpuPipelineTest, RecomputingFindsTheRandomNumbersOfAGpuThatNoInputIsOn) {
  const at::Tensor weight = torch::ones({8}, torch::requires_grad());
  const at::Tensor output =
      recompute([weight](const at::Tensor& x) { return weight * x * DrawOn(1); }, torch::ones({8}));
  const at::Tensor between = DrawOn(1);
  output.sum().backward();
  EXPECT_TRUE(weight.grad().equal(output.detach()));
  EXPECT_FALSE(DrawOn(1).equal(between)) << "the second run has put the generator back";
}

TEST_F(GpuPipelineTest, WeighingLayersDrawsNothingFromAGpu) {
  RunRanks(1, [](GpuRank&) {
    const auto generator = at::globalContext().defaultGenerator(Cuda(1));
    const at::Tensor before = generator.get_state();
    const at::Tensor expected = DrawOn(1);
    at::Generator(generator).set_state(before);
    const std::vector<PipelineFactory> layers = {[] {
      const auto module = std::make_shared<OneParameter>(DrawOn(1));
      return PipelineStage([module](const Tensors& x) { return x; }, module);
    }};
    const auto loss = [](const at::Tensor& output, const at::Tensor&) { return output.sum(); };
    const Pipeline pipeline(layers, PipelineLoss(loss), PipelineOptions().partition("parameters"));
    EXPECT_TRUE(pipeline.parameters()[0].equal(expected));
  });
}

}  // namespace
}  // namespace sirtaki::tests
