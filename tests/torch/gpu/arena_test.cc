// Gradients on GPUs that lie in an arena: what `.grad` is, what is copied, and what becomes of
// tensors that somebody keeps. The GPUs are fakes, which end the process where ranks mix memory
// that NCCL knows with other.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "sirtaki/torch.h"
#include "tests/torch/gpu/given_gradients.h"
#include "tests/torch/gpu/gpu_ranks.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::StreamHandle;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class GpuArenaTest : public GpuRanksTest {
 protected:
  // Two gradients of two ranks, the means of which are `step` + 1 and twice that; the arena is made
  // at the end of step 0.
  static void Backward(GivenGradients& model, const GpuRank& rank, int step) {
    const auto value = static_cast<float>(step + 2 * rank.number());
    model.Backward({{"b", 2 * value}, {"a", value}});
  }
  static void Check(GpuRank& rank, const GivenGradients& model, int step) {
    const auto mean = static_cast<float>(step + 1);
    EXPECT_EQ(rank.Read(model["a"].grad()), Of(3, mean));
    EXPECT_EQ(rank.Read(model["b"].grad()), Of(6, 2 * mean));
  }
  static void Fill(GivenGradients& model, const GpuRank& rank, StreamHandle backward) {
    model.Add("a", {3}, Cuda(rank.device()), backward);
    model.Add("b", {2, 3}, Cuda(rank.device()), backward);
  }

  // By rank 0, while the other waits.
  void Once(const GpuRank& rank, const std::function<void()>& call) {
    both_.arrive_and_wait();
    if (rank.number() == 0) call();
    both_.arrive_and_wait();
  }

 private:
  std::barrier<> both_{2};
};

TEST_F(GpuArenaTest, TheOptionDecidesWhetherThereIsOneAndNcclKnowsIt) {
  for (const auto mode : {core::GradientArenaMode::kPlain, core::GradientArenaMode::kOff}) {
    configure_ = [mode](core::Config& config) { config.gradient_arena = mode; };
    RunRanks(2, [&](GpuRank& rank) {
      GivenGradients model;
      Fill(model, rank, rank.stream());
      auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        Once(rank, [&] { gpus_.Forget(); });
        Backward(model, rank, step);
        optimizer.step();
        Check(rank, model, step);
        // Each of two ranks copies in, and without an arena out again.
        const std::size_t kernels = mode == core::GradientArenaMode::kPlain ? 2 : 4;
        Once(rank, [&] {
          EXPECT_TRUE(step == 0 || gpus_.calls("cuLaunchKernel").size() == kernels);
          EXPECT_THAT(gpus_.calls("ncclCommWindowRegister"), IsEmpty());
          EXPECT_THAT(gpus_.calls("ncclCommRegister"), IsEmpty());
        });
      }
    });
  }
}

TEST_F(GpuArenaTest, GradientsArePlacesOfItFromTheSecondStepOn) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Fill(model, rank, rank.stream());
    auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
    std::vector<const void*> memory;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      Once(rank, [&] { gpus_.Forget(); });
      Backward(model, rank, step);
      optimizer.step();
      Check(rank, model, step);
      Once(rank, [&] {
        // Fresh gradients are brought there by one kernel a rank, and stay.
        EXPECT_TRUE(step == 0 || gpus_.calls("cuLaunchKernel").size() == 2);
        EXPECT_THAT(gpus_.calls("ncclCommWindowRegister"), SizeIs(step == 0 ? 2 : 0));
      });
      if (step == 0) continue;
      memory.push_back(model["a"].grad().const_data_ptr());
      EXPECT_EQ(memory.back(), memory.front());
      // Side by side, as they became ready: 6 floats, and where the next place is.
      EXPECT_EQ(static_cast<const std::byte*>(memory.back()) -
                    static_cast<const std::byte*>(model["b"].grad().const_data_ptr()),
                32);
    }
  });
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

// The end of a backward() does not wait for it: it is asked for at the first, and there at the second.
TEST_F(GpuArenaTest, AveragedAtTheEndOfBackwardGradientsArePlacesOfItFromTheThirdStepOn) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Fill(model, rank, rank.stream());
    auto optimizer = model.Wrap({});
    std::vector<const void*> memory;
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      Once(rank, [&] { gpus_.Forget(); });
      Backward(model, rank, step);
      optimizer.step();
      Check(rank, model, step);
      Once(rank, [&] { EXPECT_TRUE(step < 2 || gpus_.calls("cuLaunchKernel").size() == 2); });
      // It is not waited for at the end of the first. The gradients are brought elsewhere and taken
      // back, if they are ready together, or reduced where they are.
      if (step == 1) Once(rank, [&] { EXPECT_NE(gpus_.calls("cuLaunchKernel").size(), 2); });
      if (step < 2) continue;
      memory.push_back(model["a"].grad().const_data_ptr());
      EXPECT_EQ(memory.back(), memory.front());
    }
  });
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(GpuArenaTest, WhatIsKeptThereIsNotCopied) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Fill(model, rank, rank.stream());
    auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad(/*set_to_none=*/false);
      Once(rank, [&] { gpus_.Forget(); });
      Backward(model, rank, step);
      optimizer.step();
      Check(rank, model, step);
      // The first to come into it are those that were there before. One kernel a rank divides them.
      if (step > 1) Once(rank, [&] { EXPECT_THAT(gpus_.calls("cuLaunchKernel"), SizeIs(2)); });
    }
  });
}

TEST_F(GpuArenaTest, AGradientThatSomebodyHoldsIsWrittenWhereItIs) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Fill(model, rank, rank.stream());
    auto optimizer = model.Wrap({});
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      at::Tensor mine = at::zeros({3}, Cuda(rank.device()));
      at::Tensor alias;
      // One rank replaces it, another looks at it after backward().
      if (rank.number() == 0) model["a"].mutable_grad() = mine;
      Backward(model, rank, step);
      if (rank.number() == 1) alias = model["a"].grad().view({3, 1});
      optimizer.step();
      Check(rank, model, step);
      const auto mean = static_cast<float>(step + 1);
      EXPECT_EQ(rank.Read(rank.number() == 0 ? mine : alias), Of(3, mean));
    }
  });
}

TEST_F(GpuArenaTest, WhatIsKeptOfAStepStaysAsItWasThen) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Fill(model, rank, gpus_.MakeStream());
    auto optimizer = model.Wrap({});
    std::vector<at::Tensor> kept;
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      Backward(model, rank, step);
      optimizer.step();
      // Rank 1 keeps those of every second step.
      if (rank.number() == 0 || step % 2 == 1) kept.push_back(model["b"].grad().view({6}));
    }
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const auto step = rank.number() == 0 ? i : 2 * i + 1;
      EXPECT_EQ(rank.Read(kept[i]), Of(6, 2 * static_cast<float>(step + 1)));
    }
  });
}

TEST_F(GpuArenaTest, TheNextStepWaitsForTheStreamThatReadsIt) {
  std::atomic<bool> open{false};
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    const StreamHandle backward = gpus_.MakeStream();  // behind nothing of the other
    Fill(model, rank, backward);
    auto optimizer = model.Wrap({});
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      Backward(model, rank, step);
      optimizer.step();
    }
    Check(rank, model, 1);
    gpus_.PutGate(rank.stream(), open);
    Floats late(3, -1);
    gpus_.PutCopy(rank.stream(), late.data(), model["a"].grad().const_data_ptr(), 12);
    optimizer.zero_grad();
    Backward(model, rank, 2);
    optimizer.step();
    gpus_.RunDevices();
    open = true;
    Check(rank, model, 2);
    EXPECT_EQ(late, Of(3, 2));
  });
}

TEST_F(GpuArenaTest, WhereOneRankHasNoMemoryBucketsArePacked) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Fill(model, rank, rank.stream());
    auto optimizer = model.Wrap({});
    Floats one = {1};
    Floats two = {2};
    // The staging memory.
    const std::vector<at::Tensor> tensors = {rank.Tensor(one), rank.Tensor(two)};
    grouped_allreduce(tensors, AllreduceOptions().name("first"));
    Once(rank, [&] { gpus_.SetFull(2, true); });  // rank 1's, before the first backward() ends
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      Backward(model, rank, step);
      if (step == 1) Once(rank, [&] { gpus_.SetFull(2, false); });
      optimizer.step();
      Check(rank, model, step);
    }
  });
  EXPECT_THAT(gpus_.calls("ncclCommWindowRegister"), IsEmpty());
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(GpuArenaTest, OtherCallsWithAGradientTakeACopy) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Fill(model, rank, rank.stream());
    auto optimizer = model.Wrap({});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      Backward(model, rank, step);
      optimizer.step();
    }
    const at::Tensor gradient = model["a"].grad();
    Floats own = Of(3, 5);
    const at::Tensor given = rank.number() == 0 ? gradient : rank.Tensor(own);
    allreduce_(given, AllreduceOptions().name("sum").op(ReduceOp::Sum));
    EXPECT_EQ(rank.Read(given), Of(3, 8));
    broadcast_(given, /*root_rank=*/0, BroadcastOptions().name("broadcast"));
    EXPECT_EQ(rank.Read(allgather(given, AllgatherOptions().name("all"))), Of(6, 8));
    // By itself, when another optimizer has it as well.
    auto other = model.Wrap({});
    optimizer.zero_grad(/*set_to_none=*/rank.number() == 0);
    Backward(model, rank, 3);
    optimizer.step();
    Check(rank, model, 3);
  });
}

TEST_F(GpuArenaTest, GoesWithItsLastTensorAfterTheSession) {
  std::vector<at::Tensor> kept(2);
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Fill(model, rank, rank.stream());
    auto optimizer = model.Wrap({});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      Backward(model, rank, step);
      optimizer.step();
    }
    Check(rank, model, 2);
    kept[static_cast<std::size_t>(rank.number())] = model["a"].grad();
  });
  EXPECT_EQ(gpus_.live_allocations(), 2);
  EXPECT_EQ(*static_cast<const float*>(kept[1].const_data_ptr()), 3.0F);
  kept.clear();
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(GpuArenaTest, OfAnOptimizerThatIsGoneIsGivenUpByTheNextOnes) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Fill(model, rank, rank.stream());
    for (int round = 0; round < 3; ++round) {
      auto optimizer = model.Wrap({});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        Backward(model, rank, step);
        optimizer.step();
        Check(rank, model, step);
      }
      Once(rank, [&] {
        EXPECT_THAT(gpus_.calls("ncclCommWindowDeregister"),
                    SizeIs(2 * static_cast<std::size_t>(round)));
      });
    }
  });
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(GpuArenaTest, IsTheLanesWhileTheDeviceIsBehind) {
  std::atomic<bool> open{false};
  RunRanks(2, [&](GpuRank& rank) {
    auto model = std::make_unique<GivenGradients>();
    Fill(*model, rank, rank.stream());
    auto optimizer = std::make_optional(model->Wrap({}));
    for (int step = 0; step < 3; ++step) {
      optimizer->zero_grad();
      Backward(*model, rank, step);
      optimizer->step();
      if (step == 1) Check(rank, *model, step);
      if (step == 1) gpus_.PutGate(rank.stream(), open);
    }
    const at::Tensor gradient = model->named().front().second.grad();
    optimizer.reset();
    model.reset();
    Once(rank, [&] { EXPECT_THAT(gpus_.calls("ncclMemFree"), IsEmpty()); });
    open = true;
    EXPECT_EQ(rank.Read(gradient), Of(3, 3));
  });
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(GpuArenaTest, WhatTravelsAsAnotherTypeHasNone) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Fill(model, rank, rank.stream());
    auto optimizer = model.Wrap(DistributedOptimizerOptions()
                                    .compression(Compression::BF16)
                                    .compression_scope(CompressionScope::Everywhere));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      Backward(model, rank, step);
      optimizer.step();
      Check(rank, model, step);
    }
  });
  EXPECT_THAT(gpus_.calls("ncclCommWindowRegister"), IsEmpty());
}

}  // namespace
}  // namespace sirtaki::tests
