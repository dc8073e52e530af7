// The memory of gradients on GPUs, while a device is behind its host. The GPUs are fakes, which
// overwrite memory that was freed too early.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <memory>
#include <optional>
#include <vector>

#include "sirtaki/torch.h"
#include "tests/torch/gpu/given_gradients.h"
#include "tests/torch/gpu/gpu_ranks.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::StreamHandle;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Gradients = std::vector<GivenGradients::Gradient>;

class GpuGradientMemoryTest : public GpuRanksTest {};

TEST_F(GpuGradientMemoryTest, DoesNotGrowWithTheStepsThatTheHostIsAhead) {
  for (const bool in_one_stream : {true, false}) {
    std::atomic<bool> open{false};
    RunRanks(2, [&](GpuRank& rank) {
      GivenGradients model;
      const StreamHandle backward = in_one_stream ? rank.stream() : gpus_.MakeStream();
      model.Add("a", {3}, Cuda(rank.device()), backward);
      model.Add("b", {2}, Cuda(rank.device()), backward);
      auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
      float sum = 0;
      int first = 0;
      for (int step = 0; step < 5; ++step) {
        if (step == 1) gpus_.PutGate(backward, open);
        optimizer.zero_grad();
        const auto value = static_cast<float>(step + 2 * rank.number());
        model.Backward({{"b", 2 * value}, {"a", value}});
        optimizer.step();
        sum += static_cast<float>(step + 1);
        const int blocks = LiveBlocksOn(rank.device());
        if (step <= 1) first = blocks;  // then they are in an arena
        EXPECT_EQ(blocks, first) << "after step " << step;
      }
      open = true;
      EXPECT_EQ(rank.Read(model["a"].grad()), Of(3, 5));
      EXPECT_EQ(rank.Read(model["a"].detach()), Of(3, -sum));
      EXPECT_EQ(rank.Read(model["b"].detach()), Of(2, -2 * sum));
    });
  }
}

TEST_F(GpuGradientMemoryTest, IsTheLanesUntilSomebodyWaitsForIt) {
  std::atomic<bool> open{false};
  std::barrier both(2);
  RunRanks(2, [&](GpuRank& rank) {
    auto model = std::make_unique<GivenGradients>();
    // One stream makes them, and would overwrite them next.
    model->Add("a", {3}, Cuda(rank.device()), rank.stream());
    model->Add("b", {2}, Cuda(rank.device()), rank.stream());
    auto optimizer = std::make_optional(model->Wrap({}));
    for (int step = 0; step < 2; ++step) {  // the second one has an arena
      model->Backward({{"a", 1}, {"b", 1}});
      optimizer->step();
      optimizer->zero_grad();
    }
    rank.Read((*model)["a"].detach());
    both.arrive_and_wait();

    gpus_.PutGate(rank.stream(), open);
    model->Backward({{"a", 2}, {"b", 4}});
    if (rank.number() == 0) {
      optimizer.reset();
      model.reset();
    } else {
      optimizer->synchronize();
    }
    both.arrive_and_wait();
    open = true;
    if (rank.number() == 1) {
      EXPECT_EQ(rank.Read((*model)["a"].grad()), Of(3, 2));
      EXPECT_EQ(rank.Read((*model)["b"].grad()), Of(2, 4));
    }
    both.arrive_and_wait();
  });
}

TEST_F(GpuGradientMemoryTest, MayBePartsOfOneTensorOfTheProgram) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    at::Tensor a = model.Add("a", {3}, Cuda(rank.device()));
    at::Tensor b = model.Add("b", {2}, Cuda(rank.device()));
    auto optimizer = model.Wrap({});
    const at::Tensor flat = at::zeros({5}, Cuda(rank.device()));
    for (int step = 0; step < 3; ++step) {
      const auto value = static_cast<float>(step + 2 * rank.number());
      {
        const at::NoGradGuard no_grad;
        flat.copy_(at::full({5}, value));
        a.mutable_grad() = flat.narrow(0, 0, 3).detach();
        b.mutable_grad() = flat.narrow(0, 3, 2).detach();
      }
      optimizer.step();
      EXPECT_EQ(rank.Read(flat), Of(5, static_cast<float>(step + 1)));
      optimizer.zero_grad();
    }
  });
}

TEST_F(GpuGradientMemoryTest, MayLieOtherwiseThanTheParameters) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    at::Tensor a = model.Add("a", {2, 3}, Cuda(rank.device()), rank.stream());
    auto optimizer = model.Wrap({});
    for (int step = 0; step < 3; ++step) {
      const auto value = static_cast<float>(2 * rank.number());
      a.mutable_grad() = at::zeros({3, 2}, Cuda(rank.device())).t().detach();
      model.Backward({{"a", 0, {value, value + 1, value + 2, value + 3, value + 4, value + 5}}});
      optimizer.step();
      EXPECT_EQ(a.grad().strides(), at::IntArrayRef({1, 2}));
      EXPECT_EQ(rank.Read(a.grad().t()), Floats({1, 4, 2, 5, 3, 6}));
      optimizer.zero_grad();
    }
  });
}

TEST_F(GpuGradientMemoryTest, ThatARankHadNotOnceEndsNoBucketsForEver) {
  std::barrier both(2);
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    const StreamHandle backward = gpus_.MakeStream();
    model.Add("a", {3}, Cuda(rank.device()), backward);
    model.Add("b", {2}, Cuda(rank.device()), backward);
    auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
    at::Tensor kept;
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      const auto marked = Marked(backward);
      const bool without = step == 2 && rank.number() == 1;
      model.Backward(without ? Gradients{{"a", 2}} : Gradients{{"a", 2}, {"b", 4}});
      rank.Follow(backward);
      both.arrive_and_wait();
      // The copy fails of what was kept, which has to leave the gradient's place; the bucket is taken apart.
      if (without) FailNextAllocation("CUDA out of memory");
      optimizer.step();
      EXPECT_EQ(rank.Read(model["a"].grad()), Of(3, 2));
      EXPECT_EQ(rank.Read(model["b"].grad()), Of(2, step == 2 ? 2 : 4));
      if (step == 1) kept = model["b"].grad();
      // Once for a bucket, whose last part comes in step() where there is none; and by Follow.
      const int times = (step == 0 ? 2 : without ? 0 : 1) + 1;
      EXPECT_EQ(Marked(backward) - marked, times) << "step " << step;
    }
  });
}

TEST_F(GpuGradientMemoryTest, AFailureOfTheGpuIsNotCalledAWantOfIt) {
  configure_ = [](core::Config& config) { config.bucket_bytes = 0; };
  std::barrier both(2);
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    model.Add("a", {3}, Cuda(rank.device()), gpus_.MakeStream());
    auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
    if (rank.number() == 0) model.Backward({{"a", 2}});
    both.arrive_and_wait();
    if (rank.number() == 1) FailNextAllocation("the GPU is broken");
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                AllOf(HasSubstr("gradient/a"), HasSubstr("the GPU is broken"),
                      Not(HasSubstr("out of memory"))));
  });
}

}  // namespace
}  // namespace sirtaki::tests
