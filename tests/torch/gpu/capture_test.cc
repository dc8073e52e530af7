// What DistributedOptimizer does while a stream is captured in a CUDA graph. The GPUs are fakes.
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <string>

#include "sirtaki/torch.h"
#include "tests/torch/gpu/given_gradients.h"
#include "tests/torch/gpu/gpu_ranks.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::StreamHandle;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Options = DistributedOptimizerOptions;

class GpuCaptureTest : public GpuRanksTest {
 protected:
  auto Count(const std::string& call) const {
    const auto calls = gpus_.calls();
    return std::count(calls.begin(), calls.end(), call);
  }
};

TEST_F(GpuCaptureTest, ABackwardIsRefusedOnAllRanks) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    const StreamHandle backward = gpus_.MakeStream();
    model.Add("a", {2}, Cuda(rank.device()), backward);
    model.Add("b", {2}, Cuda(rank.device()), backward);
    auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
    model.Backward({{"a", 1}, {"b", 1}});
    optimizer.step();
    optimizer.zero_grad();
    if (rank.number() == 0) gpus_.SetCapturing(backward);
    for (int i = 0; i < 2; ++i) {
      // In a bucket; and what is taken out of that is refused by itself.
      model.Backward({{"a", 1}, {"b", 1}});
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                  HasSubstr("CUDA graph"));
      optimizer.zero_grad();
    }
  });
}

TEST_F(GpuCaptureTest, ABackwardThatAveragesIsRefusedOnAllRanks) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    const StreamHandle backward = gpus_.MakeStream();
    model.Add("a", {2}, Cuda(rank.device()), backward);
    model.Add("b", {2}, Cuda(rank.device()), backward);
    auto optimizer = model.Wrap({});
    for (int step = 0; step < 4; ++step) {  // without a bucket, then in one
      optimizer.zero_grad();
      if (rank.number() == 0) gpus_.SetCapturing(backward);
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                          [&] {
                            model.Backward({{"a", 1}, {"b", 1}});
                          }),
                  HasSubstr("CUDA graph"));
      if (rank.number() == 0) gpus_.SetCapturing(backward, false);
      optimizer.zero_grad();
      model.Backward({{"a", 1}, {"b", 1}});
      optimizer.step();
    }
    EXPECT_EQ(rank.Read(model["b"].grad()), Of(2, 1));
  });
}

// A bucket that step() completes outside has no less been captured.
TEST_F(GpuCaptureTest, WhatWasCapturedIsRefusedAfterTheCaptureToo) {
  std::barrier both(2);
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    const StreamHandle backward = gpus_.MakeStream();
    model.Add("a", {2}, Cuda(rank.device()), backward);
    model.Add("b", {3}, Cuda(rank.device()), backward);
    auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
    model.Backward({{"a", 1}, {"b", 1}});
    optimizer.step();
    optimizer.zero_grad();
    if (rank.number() == 0) {
      gpus_.SetCapturing(backward);
      model.Backward({{"a", 1}});
      gpus_.SetCapturing(backward, false);
    } else {
      model.Backward({{"a", 1}, {"b", 4}});
      rank.Follow(backward);
    }
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                AllOf(HasSubstr("gradient/a"), HasSubstr("CUDA graph")));
    EXPECT_EQ(rank.Read(model["b"].grad()), Of(3, 2)) << "goes by itself";

    // And then in one bucket again.
    optimizer.zero_grad();
    both.arrive_and_wait();
    if (rank.number() == 0) gpus_.Forget();
    both.arrive_and_wait();
    model.Backward({{"a", 2}, {"b", 3}});
    optimizer.step();
    EXPECT_EQ(rank.Read(model["a"].grad()), Of(2, 2));
    both.arrive_and_wait();
    EXPECT_EQ(gpus_.calls("ncclAllReduce").size(), 2u);
  });
}

TEST_F(GpuCaptureTest, ABackwardPutsNoCopyIntoTheGraph) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    const StreamHandle backward = gpus_.MakeStream();
    model.Add("a", {2, 3}, Cuda(rank.device()), backward);
    auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
    const std::string copy = "copy_ stream " + std::to_string(gpus_.NumberOf(backward));
    for (int step = 0; step < 2; ++step) {
      // It does not lie as the parameter does.
      at::Tensor parameter = model["a"];
      parameter.mutable_grad() = at::zeros({3, 2}, Cuda(rank.device())).t().detach();
      const auto before = Count(copy);
      gpus_.SetCapturing(backward, step == 1);
      model.Backward({{"a", 1}});
      // That of the values that the test gives, and ours.
      EXPECT_EQ(Count(copy) - before, step == 1 ? 1 : 2);
      if (step == 0) {
        optimizer.step();
        optimizer.zero_grad();
      } else {
        EXPECT_THROW(optimizer.step(), Error);
        gpus_.SetCapturing(backward, false);
      }
    }
  });
}

TEST_F(GpuCaptureTest, AStepOfGradientsFromBeforeItIsRefusedHereAndCanBeRepeated) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    model.Add("a", {2}, Cuda(rank.device()), gpus_.MakeStream());
    model.Add("b", {3}, Cuda(rank.device()), gpus_.MakeStream());
    auto optimizer = model.Wrap(Options().check_parameters_every(2));
    float sum = 0;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const auto value = static_cast<float>(step + 2 * rank.number());
      model.Backward({{"a", value}, {"b", value}});
      // The others learn nothing of it.
      if (rank.number() == 0 && step > 0) {
        gpus_.SetCapturing(rank.stream());
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                    HasSubstr("CUDA graph"));
        gpus_.SetCapturing(rank.stream(), false);
      }
      optimizer.step();
      sum += static_cast<float>(step + 1);
      EXPECT_EQ(rank.Read(model["a"].detach()), Of(2, -sum));
      EXPECT_EQ(rank.Read(model["b"].detach()), Of(3, -sum));
    }
  });
}

TEST_F(GpuCaptureTest, AWholeStepIsRefusedOnAllRanks) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    const StreamHandle backward = gpus_.MakeStream();
    model.Add("a", {2}, Cuda(rank.device()), backward);
    model.Add("b", {3}, Cuda(rank.device()), backward);
    auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
    model.Backward({{"a", 1}, {"b", 1}});
    optimizer.step();
    optimizer.zero_grad();
    const auto capture = [&](bool on) {
      if (rank.number() == 1) return;
      gpus_.SetCapturing(backward, on);
      gpus_.SetCapturing(rank.stream(), on);
    };
    capture(true);
    model.Backward({{"a", 1}});
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); }),
                HasSubstr("CUDA graph"));
    capture(false);
    optimizer.zero_grad();
    model.Backward({{"a", 1}, {"b", 2}});
    optimizer.step();
    EXPECT_EQ(rank.Read(model["b"].grad()), Of(3, 2));
  });
}

}  // namespace
}  // namespace sirtaki::tests
