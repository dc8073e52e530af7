// What programs do between backward() and step(), with gradients on GPUs, which are fakes; and what
// they are told when a GPU or a rank has failed meanwhile.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <atomic>
#include <barrier>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "frameworks/torch/session/session_state.h"
#include "ops/nccl/nccl_api.h"
#include "sirtaki/torch.h"
#include "tests/support/fake_gpus_state.h"
#include "tests/torch/gpu/given_gradients.h"
#include "tests/torch/gpu/gpu_ranks.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::StreamHandle;
using ::testing::HasSubstr;

class GpuTrainingHabitsTest : public GpuRanksTest {
 protected:
  static void AwaitFault(
      const std::shared_ptr<detail::SessionState>& state = detail::CurrentSession()) {
    while (state->Check().ok()) std::this_thread::yield();
  }
};

void Add(GivenGradients& model, GpuRank& rank, StreamHandle backward) {
  model.Add("a", {3}, Cuda(rank.device()), backward);
  model.Add("b", {2}, Cuda(rank.device()), backward);
}

TEST_F(GpuTrainingHabitsTest, BackwardsWithoutSyncAddUp) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Add(model, rank, gpus_.MakeStream());
    auto optimizer = model.Wrap({});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto value = static_cast<float>(step + 2 * rank.number());
      {
        const auto hold = optimizer.no_sync();
        model.Backward({{"a", value}, {"b", 3 * value}});
      }
      model.Backward({{"a", 1}, {"b", value}});
      optimizer.step();
      EXPECT_EQ(rank.Read(model["a"].grad()), Of(3, static_cast<float>(step + 2)));
      EXPECT_EQ(rank.Read(model["b"].grad()), Of(2, 4 * static_cast<float>(step + 1)));
    }
  });
}

TEST_F(GpuTrainingHabitsTest, AStepTakesWhatWasSynchronizedOrLeavesItOut) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Add(model, rank, rank.stream());  // a backward comes behind the average that it adds to
    auto optimizer = model.Wrap({});
    float sum = 0;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const auto value = static_cast<float>(step + 2 * rank.number());
      model.Backward({{"a", value}, {"b", value}});
      optimizer.synchronize();
      if (step % 2 == 0) {
        optimizer.skip_step();
        model.Backward({{"a", 1}, {"b", 1}});
        optimizer.synchronize();
        EXPECT_EQ(rank.Read(model["a"].grad()), Of(3, static_cast<float>(step + 2)));
      }
      const auto skip = optimizer.skip_synchronize();
      optimizer.step();
      sum += static_cast<float>(step + (step % 2 == 0 ? 2 : 1));
      EXPECT_EQ(rank.Read(model["b"].detach()), Of(2, -sum));
    }
  });
}

TEST_F(GpuTrainingHabitsTest, AClosureMakesTheGradients) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Add(model, rank, gpus_.MakeStream());
    auto optimizer = model.Wrap({});
    float sum = 0;
    for (int step = 0; step < 3; ++step) {
      const auto value = static_cast<float>(step + 2 * rank.number());
      const at::Tensor loss = optimizer.step([&] {
        optimizer.zero_grad();
        model.Backward({{"a", value}, {"b", value}});
        return at::tensor({value});
      });
      EXPECT_EQ(loss.item<float>(), static_cast<float>(step + 1));
      sum += static_cast<float>(step + 1);
      EXPECT_EQ(rank.Read(model["a"].detach()), Of(3, -sum));
    }
  });
}

TEST_F(GpuTrainingHabitsTest, TwoOptimizersTakeTurns) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Add(model, rank, gpus_.MakeStream());
    auto one = model.Wrap({});
    auto other = model.Wrap({});
    float sum = 0;
    for (int step = 0; step < 5; ++step) {
      auto& optimizer = step % 2 == 0 ? one : other;
      optimizer.zero_grad();
      const auto value = static_cast<float>(step + 2 * rank.number());
      model.Backward({{"a", value}, {"b", value}});
      optimizer.step();
      sum += static_cast<float>(step + 1);
      EXPECT_EQ(rank.Read(model["a"].detach()), Of(3, -sum));
      EXPECT_EQ(rank.Read(model["b"].detach()), Of(2, -sum));
    }
  });
}

TEST_F(GpuTrainingHabitsTest, AParameterIsUnfrozenLater) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Add(model, rank, gpus_.MakeStream());
    at::Tensor b = model["b"];
    b.requires_grad_(false);
    auto optimizer = model.Wrap({});
    for (int step = 0; step < 5; ++step) {
      if (step == 2) b.requires_grad_(true);
      optimizer.zero_grad();
      const auto value = static_cast<float>(step + 2 * rank.number());
      model.Backward({{"a", value}, {"b", value}});
      optimizer.step();
      EXPECT_EQ(rank.Read(model["a"].grad()), Of(3, static_cast<float>(step + 1)));
      ASSERT_EQ(b.grad().defined(), step >= 2);
      if (step >= 2) {
        EXPECT_EQ(rank.Read(b.grad()), Of(2, static_cast<float>(step + 1)));
      }
    }
  });
}

TEST_F(GpuTrainingHabitsTest, AParameterIsAddedLater) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    const StreamHandle backward = gpus_.MakeStream();
    Add(model, rank, backward);
    auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
    for (int step = 0; step < 5; ++step) {
      if (step == 2) {
        optimizer.add_param_group(
            torch::optim::OptimizerParamGroup({model.Add("c", {4}, Cuda(rank.device()), backward)},
                                              std::make_unique<torch::optim::SGDOptions>(1.0)));
      }
      optimizer.zero_grad();
      const auto value = static_cast<float>(step + 2 * rank.number());
      std::vector<GivenGradients::Gradient> gradients;
      for (const auto& [name, parameter] : model.named()) gradients.push_back({name, value});
      const auto marked = Marked(backward);
      model.Backward(gradients);
      optimizer.step();
      // The first two by themselves, then in a bucket; the added one by itself, then in theirs.
      EXPECT_EQ(Marked(backward) - marked, step == 0 || step == 2 ? 2 : 1) << "step " << step;
      for (const auto& [name, parameter] : model.named()) {
        EXPECT_EQ(rank.Read(parameter.grad()), Of(parameter.numel(), static_cast<float>(step + 1)));
      }
    }
  });
}

TEST_F(GpuTrainingHabitsTest, AModelMovesToAnotherGpu) {
  std::barrier both(2);
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Add(model, rank, gpus_.MakeStream());
    SetCurrentStream(rank.device() + 4, gpus_.MakeStream());
    auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      if (step == 2) {
        for (const auto& [name, parameter] : model.named()) {
          at::Tensor moved = parameter;
          moved.set_data(at::zeros(parameter.sizes(), Cuda(rank.device() + 4)));
        }
        optimizer.zero_grad();
      }
      both.arrive_and_wait();
      if (rank.number() == 0) gpus_.Forget();
      both.arrive_and_wait();
      const auto value = static_cast<float>(step + 2 * rank.number());
      model.Backward({{"a", value}, {"b", value}});
      optimizer.step();
      for (const auto& [name, parameter] : model.named()) {
        EXPECT_EQ(parameter.grad().device(), parameter.device());
        EXPECT_EQ(rank.Read(parameter.grad()), Of(parameter.numel(), static_cast<float>(step + 1)));
      }
      both.arrive_and_wait();
      // By themselves two may share a call or not.
      EXPECT_TRUE(step == 0 || step == 2 || gpus_.calls("ncclAllReduce").size() == 2);
    }
  });
}

TEST_F(GpuTrainingHabitsTest, DenseGradientsStayDense) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Add(model, rank, gpus_.MakeStream());
    auto optimizer = model.Wrap(DistributedOptimizerOptions().sparse_as_dense(true));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto value = static_cast<float>(step + 2 * rank.number());
      model.Backward({{"a", value}, {"b", value}});
      optimizer.step();
      EXPECT_EQ(rank.Read(model["a"].grad()), Of(3, static_cast<float>(step + 1)));
    }
  });
}

TEST_F(GpuTrainingHabitsTest, ANormIsThatOfAllDevices) {
  RunRanks(2, [&](GpuRank& rank) {
    const at::Device second = Cuda(rank.device() + 4);
    SetCurrentStream(second.index(), gpus_.MakeStream());
    GivenGradients model;
    model.Add("a", {1}, Cuda(rank.device()));
    model.Add("b", {1}, second);
    model.Add("c", {1}, at::kCPU);
    model.Add("d", {1}, second);
    auto optimizer = model.Wrap({});
    const auto factor = static_cast<float>(2 * rank.number());
    model.Backward({{"a", 2 * factor}, {"b", 4 * factor}, {"c", 5 * factor}, {"d", 2 * factor}});
    EXPECT_NEAR(clip_grad_norm_(optimizer, 3.5), 7, 1e-9);
    EXPECT_NEAR(rank.Read(model["a"].grad())[0], 1, 1e-5);
    EXPECT_NEAR(rank.Read(model["b"].grad())[0], 2, 1e-5);
    EXPECT_NEAR(model["c"].grad().item<float>(), 2.5, 1e-5);
    EXPECT_NEAR(rank.Read(model["d"].grad())[0], 1, 1e-5);
  });
}

// ---- failures ----

TEST_F(GpuTrainingHabitsTest, AFaultAfterTheLaunchIsThrownByStep) {
  for (const bool skip : {false, true}) {
    std::atomic<bool> open{false};
    std::barrier both(2);
    RunRanks(2, [&](GpuRank& rank) {
      GivenGradients model;
      const StreamHandle backward = gpus_.MakeStream();
      model.Add("a", {3}, Cuda(rank.device()), backward);
      auto optimizer = model.Wrap({});
      for (int step = 0; step < 2; ++step) {  // the second one has the arena of the bucket
        model.Backward({{"a", 1}});
        optimizer.step();
        optimizer.zero_grad();
      }
      gpus_.PutGate(backward, open);
      model.Backward({{"a", 1}});
      optimizer.synchronize();
      both.arrive_and_wait();  // launched
      if (rank.number() == 0) abort("enough");
      AwaitFault();
      std::optional<detail::Scope> scope;
      if (skip) scope.emplace(optimizer.skip_synchronize());
      EXPECT_THAT(ErrorOf(ErrorCode::Aborted, [&] { optimizer.step(); }), HasSubstr("enough"));
      both.arrive_and_wait();
      open = true;
      gpus_.RunDevices();
    });
  }
}

TEST_F(GpuTrainingHabitsTest, WhatNcclRefusesOfABucketIsToldToAll) {
  std::barrier both(2);
  gpus_.SetLastNcclError("the cable is out");
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Add(model, rank, gpus_.MakeStream());
    auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
    model.Backward({{"a", 1}, {"b", 1}});
    optimizer.step();
    both.arrive_and_wait();
    if (rank.number() == 0) {
      gpus_.FailNext("ncclAllReduce", static_cast<int>(ops::nccl::Result::kSystemError));
    }
    both.arrive_and_wait();
    optimizer.zero_grad();
    model.Backward({{"a", 1}, {"b", 1}});
    // Whose launch went well may learn of it a step later.
    const auto steps = [&] {
      optimizer.step();
      AwaitFault();
      optimizer.step();
    };
    EXPECT_THAT(ErrorOf(ErrorCode::Backend, steps), HasSubstr("the cable is out"));
  });
}

// What the host has is right, whatever happens later.
TEST_F(GpuTrainingHabitsTest, AFaultLeavesTheHostsGradientsToWhoHasThem) {
  std::barrier both(2);
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    model.Add("a", {3}, at::kCPU);
    auto optimizer = model.Wrap({});
    model.Backward({{"a", static_cast<float>(2 * rank.number())}});
    optimizer.synchronize();
    both.arrive_and_wait();
    if (rank.number() == 0) abort("enough");
    AwaitFault();
    const auto skip = optimizer.skip_synchronize();
    optimizer.step();
    EXPECT_TRUE(model["a"].detach().equal(at::full({3}, -1.0F)));
  });
}

// Lets something happen just before a stream waits.
struct BeforeWait {
  static inline std::atomic<StreamHandle> stream{nullptr};
  static inline std::function<void()> happens;
  static inline decltype(ops::cuda::Api::StreamWaitEvent) wait;

  static ops::cuda::Error Wait(StreamHandle which, ops::cuda::EventHandle event, unsigned flags) {
    if (which != nullptr && which == stream) happens();
    return wait(which, event, flags);
  }
};

// When all its gradients are launched, so that none of them can tell.
TEST_F(GpuTrainingHabitsTest, AFaultAtTheEndOfBackwardIsThrownByIt) {
  struct Module : torch::nn::Module {
    explicit Module(const GivenGradients& model) {
      for (const auto& [name, parameter] : model.named()) register_parameter(name, parameter);
    }
    void forward() {}
  };
  ops::cuda::Api& api = TheFakeGpus().cuda;
  BeforeWait::wait = api.StreamWaitEvent;
  api.StreamWaitEvent = BeforeWait::Wait;
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    model.Add("a", {3}, Cuda(rank.device()), rank.stream());
    const auto module = std::make_shared<Module>(model);
    DistributedDataParallel<Module> wrapped(module);
    wrapped.forward();
    model.Backward({{"a", 1}});
    rank.Read(model["a"].grad());
    module->zero_grad();
    wrapped.forward();
    if (rank.number() == 0) {
      BeforeWait::happens = [session = detail::CurrentSession()] {
        BeforeWait::stream = nullptr;
        const detail::SessionScope scope(session);  // a thread of autograd's calls this
        abort("enough");
        AwaitFault();
      };
      BeforeWait::stream = rank.stream();
      EXPECT_THAT(ErrorOf(ErrorCode::Aborted,
                          [&] {
                            model.Backward({{"a", 1}});
                          }),
                  HasSubstr("enough"));
    } else {
      // It may have been through before.
      try {
        model.Backward({{"a", 1}});
      } catch (const Error&) {
      }
    }
  });
  BeforeWait::stream = nullptr;
  BeforeWait::happens = nullptr;
}

TEST_F(GpuTrainingHabitsTest, AFaultWhileANormIsReadIsThrown) {
  std::shared_ptr<detail::SessionState> reader;
  std::barrier both(2);
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    Add(model, rank, rank.stream());
    auto optimizer = model.Wrap({});
    model.Backward({{"a", 1}, {"b", 1}});
    optimizer.synchronize();
    rank.Read(model["a"].grad());
    if (rank.number() == 0) reader = detail::CurrentSession();
    both.arrive_and_wait();
    const int before = rank.number() == 1 ? ReadBacks(Cuda(rank.device() - 1)) : 0;
    both.arrive_and_wait();
    if (rank.number() == 0) {
      EXPECT_THAT(ErrorOf(ErrorCode::Aborted, [&] { clip_grad_norm_(optimizer, 1); }),
                  HasSubstr("enough"));
      return;
    }
    // The norm of this rank, which the reader waits for when it has read its own, never comes.
    const at::Device device = Cuda(rank.device() - 1);
    while (ReadBacks(device) == before) std::this_thread::yield();
    abort("enough");
    AwaitFault(reader);
  });
}

}  // namespace
}  // namespace sirtaki::tests
