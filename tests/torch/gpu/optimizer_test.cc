// DistributedOptimizer and DistributedDataParallel with parameters on GPUs, which are fakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <atomic>
#include <barrier>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "sirtaki/torch.h"
#include "tests/torch/gpu/given_gradients.h"
#include "tests/torch/gpu/gpu_ranks.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::StreamHandle;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using Options = DistributedOptimizerOptions;
using Gradients = std::vector<GivenGradients::Gradient>;

class GpuOptimizerTest : public GpuRanksTest {};

TEST_F(GpuOptimizerTest, GradientsAreTheMeanAndGoInOneBucketOnceTheirOrderIsKnown) {
  std::barrier both(2);
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    const StreamHandle backward = gpus_.MakeStream();
    model.Add("a", {3}, Cuda(rank.device()), backward);
    model.Add("b", {2, 2}, Cuda(rank.device()), backward);
    model.Add("c", {5}, Cuda(rank.device()), backward);
    auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
    float sum = 0;
    for (int step = 0; step < 4; ++step) {
      both.arrive_and_wait();
      if (rank.number() == 0) gpus_.Forget();
      both.arrive_and_wait();
      optimizer.zero_grad();
      const auto value = static_cast<float>(1 + step + 2 * rank.number());
      model.Backward({{"c", value}, {"b", 2 * value}, {"a", 3 * value}});
      optimizer.step();
      const auto mean = static_cast<float>(2 + step);
      sum += mean;
      EXPECT_EQ(rank.Read(model["a"].grad()), Of(3, 3 * mean));
      EXPECT_EQ(rank.Read(model["b"].grad()), Of(4, 2 * mean));
      EXPECT_EQ(rank.Read(model["c"].grad()), Of(5, mean));
      EXPECT_EQ(rank.Read(model["c"].detach()), Of(5, -sum));
      both.arrive_and_wait();
      EXPECT_EQ(Marked(backward), step == 0 ? 3 : 1);
      EXPECT_TRUE(step == 0 || gpus_.calls("ncclAllReduce").size() == 2);
    }
  });
}

TEST_F(GpuOptimizerTest, LaunchesInOneOrderWhicheverGradientIsReadyFirst) {
  constexpr int kParameters = 12;
  const auto seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  configure_ = [](core::Config& config) { config.bucket_bytes = config.first_bucket_bytes = 64; };
  RunRanks(2, [&](GpuRank& rank) {
    std::mt19937 random(seed + static_cast<unsigned>(rank.number()));
    GivenGradients model;
    const std::vector<StreamHandle> streams = {gpus_.MakeStream(), gpus_.MakeStream()};
    Gradients gradients;
    for (int i = 0; i < kParameters; ++i) {
      const std::string name = "p" + std::to_string(i);
      model.Add(name, {1 + i}, Cuda(rank.device()), streams[random() % 2]);
      gradients.push_back({name, static_cast<float>(i + 2 * rank.number())});
    }
    auto optimizer = model.Wrap({});
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      std::shuffle(gradients.begin(), gradients.end(), random);
      model.Backward(gradients);
      optimizer.step();
      for (int i = 0; i < kParameters; ++i) {
        EXPECT_EQ(rank.Read(model["p" + std::to_string(i)].grad()),
                  Of(1 + i, static_cast<float>(i + 1)));
      }
    }
  });
  const std::vector<std::string> first = gpus_.calls("ncclAllReduce rank 0 ");
  std::vector<std::string> second = gpus_.calls("ncclAllReduce rank 1 ");
  for (std::string& call : second) call[std::string("ncclAllReduce rank ").size()] = '0';
  EXPECT_EQ(first, second);
  EXPECT_GT(first.size(), 60u);
}

TEST_F(GpuOptimizerTest, ABucketWaitsForBothStreamsOfItsGradientsButNobodyElseDoes) {
  std::atomic<bool> open{false};
  std::barrier both(2);
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    const StreamHandle one = gpus_.MakeStream();
    const StreamHandle other = gpus_.MakeStream();
    model.Add("a", {2}, Cuda(rank.device()), one);
    model.Add("b", {3}, Cuda(rank.device()), other);
    model.Add("c", {4}, Cuda(rank.device()), one);
    auto optimizer = model.Wrap(DistributedOptimizerOptions().average_at(Average::Step));
    const auto value = static_cast<float>(1 + 2 * rank.number());
    model.Backward({{"a", value}, {"b", value}, {"c", value}});
    optimizer.step();
    // They belong to the streams of backward(), and are used in another.
    EXPECT_THAT(RecordedOn(model["c"].grad()), Contains(rank.stream()));
    optimizer.zero_grad();
    both.arrive_and_wait();
    if (rank.number() == 0) gpus_.Forget();
    both.arrive_and_wait();

    gpus_.PutGate(other, open);
    model.Backward({{"a", value + 2}, {"b", value + 4}, {"c", value + 6}});
    optimizer.step();  // returns while the device waits
    Floats found(4, -1);
    gpus_.PutCopy(rank.stream(), found.data(), model["c"].grad().const_data_ptr(), 16);
    gpus_.RunDevices();
    EXPECT_EQ(found, Of(4, -1));
    both.arrive_and_wait();
    EXPECT_EQ(Marked(one), 1);
    EXPECT_EQ(Marked(other), 1);
    open = true;
    EXPECT_EQ(rank.Read(model["a"].grad()), Of(2, 4));
    EXPECT_EQ(rank.Read(model["b"].grad()), Of(3, 6));
    EXPECT_EQ(found, Of(4, 8));
  });
}

TEST_F(GpuOptimizerTest, WhatNobodyHasMadeComesInStep) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    const StreamHandle backward = gpus_.MakeStream();
    model.Add("both", {2}, Cuda(rank.device()), backward);
    model.Add("one", {3}, Cuda(rank.device()), backward);
    model.Add("none", {4}, Cuda(rank.device()), backward);
    auto optimizer = model.Wrap({});
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      Gradients gradients = {{"both", 2}};
      // In its bucket from the second step on; there the last to come is this rank's step().
      if (step == 0 || rank.number() == 1) gradients.push_back({"one", 4});
      model.Backward(gradients);
      optimizer.step();
      EXPECT_EQ(rank.Read(model["both"].grad()), Of(2, 2));
      EXPECT_EQ(rank.Read(model["one"].grad()), Of(3, step == 0 ? 4 : 2));
      EXPECT_FALSE(model["none"].grad().defined());
    }
  });
}

TEST_F(GpuOptimizerTest, AGradientThatWasKeptStaysAsItWas) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    model.Add("a", {3}, Cuda(rank.device()), gpus_.MakeStream());
    auto optimizer = model.Wrap({});
    std::vector<at::Tensor> kept;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      model.Backward({{"a", static_cast<float>(step + 2 * rank.number())}});
      optimizer.step();
      kept.push_back(model["a"].grad());
    }
    for (int step = 0; step < 4; ++step) {
      EXPECT_EQ(rank.Read(kept[static_cast<std::size_t>(step)]),
                Of(3, static_cast<float>(step + 1)));
    }
  });
}

TEST_F(GpuOptimizerTest, PassesAddUpInGradientsThatAreKept) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    // The stream of zero_grad() and of backward() is one.
    model.Add("a", {3}, Cuda(rank.device()), rank.stream());
    model.Add("b", {2}, Cuda(rank.device()), rank.stream());
    auto optimizer = model.Wrap(Options().backward_passes_per_step(2).average_at(Average::Step));
    const void* memory = nullptr;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad(/*set_to_none=*/false);
      const auto value = static_cast<float>(step + 2 * rank.number());
      model.Backward({{"a", value}, {"b", value}});
      model.Backward({{"a", 2 * value}, {"b", value}});
      optimizer.step();
      EXPECT_EQ(rank.Read(model["a"].grad()), Of(3, 3 * static_cast<float>(step + 1)));
      EXPECT_EQ(rank.Read(model["b"].grad()), Of(2, 2 * static_cast<float>(step + 1)));
      const void* const now = model["a"].grad().const_data_ptr();
      EXPECT_TRUE(step <= 1 || now == memory);  // they move into the arena when that is there
      memory = now;
    }
  });
}

TEST_F(GpuOptimizerTest, TheHostAndTheGpuInOneStep) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    model.Add("gpu1", {3}, Cuda(rank.device()), gpus_.MakeStream());
    model.Add("host1", {2}, at::kCPU);
    model.Add("gpu2", {4}, Cuda(rank.device()), gpus_.MakeStream());
    model.Add("host2", {5}, at::kCPU);
    auto optimizer = model.Wrap({});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto value = static_cast<float>(step + 2 * rank.number());
      model.Backward({{"host2", value}, {"gpu2", value}, {"host1", value}, {"gpu1", value}});
      optimizer.step();
      const auto mean = static_cast<float>(step + 1);
      EXPECT_EQ(rank.Read(model["gpu1"].grad()), Of(3, mean));
      EXPECT_EQ(rank.Read(model["gpu2"].grad()), Of(4, mean));
      EXPECT_TRUE(model["host1"].grad().equal(at::full({2}, mean)));
      EXPECT_TRUE(model["host2"].grad().equal(at::full({5}, mean)));
    }
  });
}

TEST_F(GpuOptimizerTest, TwoGpusOfARankHaveTheSlotsOfTheirParametersOrder) {
  RunRanks(2, [&](GpuRank& rank) {
    const int second = rank.device() + 4;
    SetCurrentStream(second, gpus_.MakeStream());
    GivenGradients model;
    model.Add("a", {3}, Cuda(rank.device()), gpus_.MakeStream());
    model.Add("b", {4}, Cuda(second), gpus_.MakeStream());
    model.Add("c", {5}, Cuda(rank.device()), gpus_.MakeStream());
    model.Add("d", {6}, Cuda(second), gpus_.MakeStream());
    auto optimizer = model.Wrap({});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto value = static_cast<float>(step + 2 * rank.number());
      // The ranks use their GPUs first in different orders.
      if (rank.number() == 0) {
        model.Backward({{"a", value}, {"c", value}, {"b", value}, {"d", value}});
      } else {
        model.Backward({{"d", value}, {"b", value}, {"c", value}, {"a", value}});
      }
      optimizer.step();
      for (const auto& [name, parameter] : model.named()) {
        EXPECT_EQ(rank.Read(parameter.grad()), Of(parameter.numel(), static_cast<float>(step + 1)));
      }
    }
  });
}

TEST_F(GpuOptimizerTest, TheHostHereAndAGpuThereIsSaidWhereItIsMade) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    model.Add("w", {2}, rank.number() == 0 ? at::Device(at::kCPU) : Cuda(rank.device()));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { model.Wrap({}); }),
                AllOf(HasSubstr("\"w\""), HasSubstr("on a GPU")));
  });
}

TEST_F(GpuOptimizerTest, HalfTypesOnTheWay) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    model.Add("a", {3}, Cuda(rank.device()), gpus_.MakeStream());
    model.Add("b", {2}, Cuda(rank.device()), gpus_.MakeStream());
    auto optimizer = model.Wrap(
        Options().compression(Compression::F16).compression_scope(CompressionScope::Everywhere));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      // float16 has no such number.
      model.Backward({{"a", 1.0F + 0x1p-14F}, {"b", 2.0F}});
      optimizer.step();
      EXPECT_EQ(rank.Read(model["a"].grad()), Of(3, 1));
      EXPECT_EQ(rank.Read(model["b"].grad()), Of(2, 2));
    }
  });
}

TEST_F(GpuOptimizerTest, AGradientLiesAsItsParameterDoes) {
  RunRanks(2, [&](GpuRank& rank) {
    Floats memory = Of(6, 0);
    GivenGradients model;
    model.Add("a", {2, 3}, Cuda(rank.device()), gpus_.MakeStream());
    // Column by column.
    at::Tensor& turned = const_cast<at::Tensor&>(model["a"]);
    turned.set_data(rank.Tensor(memory).view({3, 2}).t());
    auto optimizer = model.Wrap({});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto value = static_cast<float>(2 * rank.number());
      model.Backward({{"a", 0, {value, value + 1, value + 2, value + 3, value + 4, value + 5}}});
      optimizer.step();
      EXPECT_EQ(model["a"].grad().strides(), at::IntArrayRef({1, 2}));
      EXPECT_EQ(rank.Read(model["a"].grad().t()), Floats({1, 4, 2, 5, 3, 6}));
    }
  });
}

TEST_F(GpuOptimizerTest, AProcessSetAveragesAmongItself) {
  RunRanks(3, [&](GpuRank& rank) {
    const ProcessSet set = add_process_set({0, 2});
    if (rank.number() == 1) return;
    GivenGradients model;
    model.Add("a", {3}, Cuda(rank.device()), gpus_.MakeStream());
    model.Add("b", {2}, Cuda(rank.device()), gpus_.MakeStream());
    auto optimizer = model.Wrap(Options().process_set(set));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto value = static_cast<float>(step + 2 * rank.number());
      model.Backward({{"a", value}, {"b", value}});
      optimizer.step();
      EXPECT_EQ(rank.Read(model["a"].grad()), Of(3, static_cast<float>(step + 2)));
    }
  });
}

TEST_F(GpuOptimizerTest, AModuleHasItsMeanWhenBackwardReturns) {
  struct Module : torch::nn::Module {
    explicit Module(const GivenGradients& model) {
      for (const auto& [name, parameter] : model.named()) register_parameter(name, parameter);
    }
    void forward() {}
  };
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    model.Add("a", {3}, Cuda(rank.device()), gpus_.MakeStream());
    model.Add("b", {2}, at::kCPU);
    const auto module = std::make_shared<Module>(model);
    DistributedDataParallel<Module> wrapped(module);
    for (int step = 0; step < 3; ++step) {
      module->zero_grad();
      wrapped.forward();
      const auto value = static_cast<float>(step + 2 * rank.number());
      model.Backward({{"a", value}, {"b", value}});
      EXPECT_EQ(rank.Read(model["a"].grad()), Of(3, static_cast<float>(step + 1)));
      EXPECT_TRUE(model["b"].grad().equal(at::full({2}, static_cast<float>(step + 1))));
    }
  });
}

TEST_F(GpuOptimizerTest, ParametersThatDifferAreFound) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    const at::Tensor a = model.Add("a", {3}, Cuda(rank.device()));
    const at::Tensor b = model.Add("b", {2}, Cuda(rank.device()));
    auto optimizer = model.Wrap(Options().check_parameters_every(1));
    optimizer.step();
    if (rank.number() == 1) b.detach().copy_(at::full({2}, 5.0F));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { optimizer.step(); }),
                AllOf(HasSubstr("\"b\""), HasSubstr("[0], is 0"), HasSubstr("5")));
  });
}

TEST_F(GpuOptimizerTest, AHookGetsTheGradientWhereItIs) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    model.Add("a", {3}, Cuda(rank.device()), rank.stream());
    auto optimizer = model.Wrap(Options().hook([&](const GradientBucket& bucket) {
      const at::Tensor buffer = bucket.buffer;
      EXPECT_TRUE(buffer.is_cuda());
      const Handle handle =
          allreduce_async_(buffer, AllreduceOptions().name("of the hook").op(ReduceOp::Sum));
      return [handle] { return synchronize(handle); };
    }));
    model.Backward({{"a", static_cast<float>(1 + rank.number())}});
    optimizer.step();
    EXPECT_EQ(rank.Read(model["a"].grad()), Of(3, 3));
  });
}

TEST_F(GpuOptimizerTest, AHookGetsABucketThatSeveralStreamsHaveMade) {
  RunRanks(2, [&](GpuRank& rank) {
    GivenGradients model;
    model.Add("a", {3}, Cuda(rank.device()), gpus_.MakeStream());
    model.Add("b", {2, 2}, Cuda(rank.device()), gpus_.MakeStream());
    std::vector<std::size_t> gradients;
    auto optimizer = model.Wrap(Options().hook([&](const GradientBucket& bucket) {
      gradients.push_back(bucket.gradients.size());
      const Handle handle = allreduce_async_(
          bucket.buffer, AllreduceOptions().name(bucket.name + "/sum").op(ReduceOp::Sum));
      return [handle] { return synchronize(handle); };
    }));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto value = static_cast<float>(1 + step + rank.number());
      model.Backward({{"a", value}, {"b", 10 * value}});
      optimizer.step();
      const auto sum = static_cast<float>(3 + 2 * step);
      EXPECT_EQ(rank.Read(model["a"].grad()), Of(3, sum));
      EXPECT_EQ(rank.Read(model["b"].grad()), Of(4, 10 * sum));
    }
    EXPECT_THAT(gradients, ::testing::ElementsAre(1, 1, 2, 2));
  });
}

}  // namespace
}  // namespace sirtaki::tests
