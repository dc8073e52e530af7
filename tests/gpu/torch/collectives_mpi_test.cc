// RANKS: 1 2
// The public collectives on real GPUs, of which there may be fewer than ranks. Skips with a reason
// where there is none.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu/torch/gpu_rank.h"

namespace sirtaki::tests {
namespace {

using ::testing::HasSubstr;

class GpuCollectivesTest : public GpuRankTest {
 protected:
  static torch::TensorOptions On(torch::ScalarType type = torch::kFloat) {
    return torch::TensorOptions().dtype(type).device(device_);
  }
  // The sum over the ranks of 1, 2, …
  static double Sum() { return size() * (size() + 1) / 2.0; }
};

AllreduceOptions SumOf(const std::string& name) {
  return AllreduceOptions().name(name).op(ReduceOp::Sum);
}

TEST_F(GpuCollectivesTest, SumsInEveryTypeAndManySizes) {
  for (const auto type : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16,
                          torch::kInt, torch::kLong, torch::kByte}) {
    for (const std::int64_t count : {0, 1, 33, 5000, 3000000}) {
      const torch::Tensor mine = torch::full({count}, rank() + 1, On(type));
      const torch::Tensor sum = allreduce(mine, SumOf("w"));
      EXPECT_TRUE(sum.equal(torch::full({count}, Sum(), On(type)))) << type << " " << count;
      EXPECT_TRUE(mine.equal(torch::full({count}, rank() + 1, On(type))));
    }
  }
}

TEST_F(GpuCollectivesTest, ATensorThatDoesNotLieFlatIsReducedInPlace) {
  const torch::Tensor whole = torch::arange(60, On()).view({6, 10});
  const torch::Tensor before = whole.clone();
  allreduce_(whole.t().slice(0, 2, 8), SumOf("strided"));
  torch::Tensor expected = before.clone();
  expected.slice(1, 2, 8).mul_(size());
  EXPECT_TRUE(whole.equal(expected));
}

TEST_F(GpuCollectivesTest, WhatIsStillBeingComputedIsReducedWhenItIsThere) {
  torch::Tensor square = torch::eye(2048, On()) * 0.5;
  for (int round = 0; round < 5; ++round) {
    torch::Tensor power = square;
    for (int i = 0; i < 20; ++i) power = torch::mm(power, square) * 2;  // takes the device a while
    power = power * (rank() + 1.0);
    const Handle handle = allreduce_async_(power, SumOf("power"));
    power = torch::Tensor();
    const torch::Tensor sum = synchronize(handle);
    EXPECT_NEAR(sum.sum().item<double>(), 2048 * 0.5 * Sum(), 1e-3);
  }
}

TEST_F(GpuCollectivesTest, MemoryThatComesAndGoesIsNeverMixedUp) {
  for (int round = 0; round < 100; ++round) {
    const std::int64_t rows = 1000 + 100 * rank() + round;
    std::vector<Handle> handles;
    for (int i = 0; i < 4; ++i) {
      handles.push_back(
          allgather_async(torch::full({rows, 16}, 10.0 * round + i + rank() * 1000, On()),
                          AllgatherOptions().name("gather" + std::to_string(i))));
    }
    for (int i = 3; i >= 0; --i) {
      const torch::Tensor all = synchronize(handles[static_cast<std::size_t>(i)]);
      std::int64_t begin = 0;
      for (int r = 0; r < size(); ++r) {
        const std::int64_t of_rank = 1000 + 100 * r + round;
        const torch::Tensor part = all.slice(0, begin, begin + of_rank);
        EXPECT_TRUE((part == 10.0 * round + i + r * 1000).all().item<bool>());
        begin += of_rank;
      }
      EXPECT_EQ(all.size(0), begin);
    }
  }
}

TEST_F(GpuCollectivesTest, TheOtherKinds) {
  const torch::Tensor mine = torch::full({2 * size(), 3}, rank() + 1.0, On());
  EXPECT_TRUE(broadcast(mine, 0).equal(torch::ones({2 * size(), 3}, On())));
  EXPECT_TRUE(reducescatter(mine, ReducescatterOptions().op(ReduceOp::Sum))
                  .equal(torch::full({2, 3}, Sum(), On())));
  const torch::Tensor each = torch::arange(1, size() + 1, On()).repeat_interleave(2);
  EXPECT_TRUE(alltoall(mine).tensor.select(1, 0).equal(each));
  EXPECT_TRUE(allgather_into(mine.slice(0, 0, 2)).select(1, 0).equal(each));
  const torch::Tensor scaled =
      allreduce(mine, AllreduceOptions().name("scaled").prescale(0.5).postscale(4));
  EXPECT_TRUE(torch::allclose(scaled, torch::full_like(mine, 2 * Sum() / size())));
}

TEST_F(GpuCollectivesTest, AGroupOfManyBesideTheHost) {
  std::vector<torch::Tensor> tensors;
  for (int i = 0; i < 50; ++i) {
    const torch::Tensor tensor = torch::full({i * 7}, rank() + 1.0 + i);
    tensors.push_back(i % 3 == 0 ? tensor : tensor.to(device_));
  }
  grouped_allreduce_(tensors, SumOf("group"));
  for (int i = 0; i < 50; ++i) {
    const torch::Tensor sum = tensors[static_cast<std::size_t>(i)].cpu();
    EXPECT_TRUE(sum.equal(torch::full({i * 7}, Sum() + i * size()))) << i;
  }
}

TEST_F(GpuCollectivesTest, MessagesGoAroundARing) {
  const int next = (rank() + 1) % size();
  const int previous = (rank() + size() - 1) % size();
  for (int round = 0; round < 20; ++round) {
    const std::int64_t rows = 1 + 20000 * (round % 4);
    torch::Tensor mine = torch::full({rows, 7}, 100.0 * round + rank(), On());
    // What was received last is not overwritten before it was read.
    torch::Tensor got = torch::zeros({7, rows}, On()).t();
    const Handle receiving = irecv(got, previous);
    const Handle sending = isend(mine, next);
    mine = torch::Tensor();
    EXPECT_TRUE((synchronize(receiving) == 100.0 * round + previous).all().item<bool>());
    synchronize(sending);
  }
}

// The first go through the host, the others by NCCL once the ranks have come to a pair, which is not seen
// here. What a rank
// sends on is made of what it has received, in the current stream, and tags are posted in opposite
// orders.
TEST_F(GpuCollectivesTest, LargeMessagesGoAroundARingInBothDirections) {
  const int next = (rank() + 1) % size();
  const int previous = (rank() + size() - 1) % size();
  constexpr int kTags = 4;
  constexpr std::int64_t kCount = 300000;
  std::vector<torch::Tensor> forward;
  std::vector<torch::Tensor> backward;
  for (int tag = 0; tag < kTags; ++tag) {
    forward.push_back(torch::full({kCount + tag}, 10.0 * rank() + tag, On()));
    backward.push_back(torch::full({kCount + tag}, -10.0 * rank() - tag, On()));
  }
  const int rounds = 20 * size();  // all are where they were in the end
  for (int round = 0; round < rounds; ++round) {
    std::vector<Handle> handles;
    std::vector<torch::Tensor> from_previous;
    std::vector<torch::Tensor> from_next;
    for (int tag = 0; tag < kTags; ++tag) {
      const auto at = static_cast<std::size_t>(tag);
      handles.push_back(isend(forward[at], next, MessageOptions().tag(tag)));
      handles.push_back(isend(backward[at], previous, MessageOptions().tag(kTags + tag)));
      from_previous.push_back(torch::zeros({kCount + tag}, On()));
      from_next.push_back(torch::zeros({kCount + tag}, On()));
    }
    for (int tag = kTags - 1; tag >= 0; --tag) {
      const auto at = static_cast<std::size_t>(tag);
      handles.push_back(irecv(from_next[at], next, MessageOptions().tag(kTags + tag)));
      handles.push_back(irecv(from_previous[at], previous, MessageOptions().tag(tag)));
    }
    for (const Handle& handle : handles) synchronize(handle);
    for (std::size_t at = 0; at < kTags; ++at) {
      forward[at] = from_previous[at] + 1;
      backward[at] = from_next[at] - 1;
    }
  }
  for (int tag = 0; tag < kTags; ++tag) {
    const auto at = static_cast<std::size_t>(tag);
    const double expected = 10.0 * rank() + tag + rounds;
    EXPECT_TRUE((forward[at] == expected).all().item<bool>()) << tag;
    EXPECT_TRUE((backward[at] == -expected).all().item<bool>()) << tag;
  }
}

TEST_F(GpuCollectivesTest, AMessageMayHaveOneSideOnTheHost) {
  const int next = (rank() + 1) % size();
  const int previous = (rank() + size() - 1) % size();
  torch::Tensor on_host = torch::zeros({5000});
  const Handle receiving = irecv(on_host, previous);
  send(torch::full({5000}, rank() + 1.0, On()), next);
  EXPECT_TRUE(synchronize(receiving).equal(torch::full({5000}, previous + 1.0)));
  torch::Tensor on_gpu = torch::zeros({5000}, On());
  const Handle back = irecv(on_gpu, previous);
  send(on_host, next);
  const int before_that = (previous + size() - 1) % size();
  EXPECT_TRUE(synchronize(back).equal(torch::full({5000}, before_that + 1.0, On())));
}

TEST_F(GpuCollectivesTest, SparseTensorsAreAddedUp) {
  for (const auto type : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kInt}) {
    const torch::Tensor indices = torch::tensor({{rank(), 9, 9}}, On(torch::kLong));
    const torch::Tensor values = torch::ones({3, 4}, On(type));
    const torch::Tensor sum = sparse_allreduce(
        torch::sparse_coo_tensor(indices, values, {10 + size(), 4}), SumOf("sparse"));
    EXPECT_TRUE(sum.is_coalesced());
    torch::Tensor expected = torch::zeros({10 + size(), 4}, On(type));
    for (int r = 0; r < size(); ++r) expected[r] += 1;
    expected[9] += 2 * size();
    EXPECT_TRUE(sum.to_dense().equal(expected)) << type;
  }
}

TEST_F(GpuCollectivesTest, GradientsFlowThrough) {
  torch::Tensor mine = torch::full({4}, rank() + 1.0, On()).requires_grad_();
  (allreduce(mine, SumOf("graph")) * (rank() + 1.0)).sum().backward();
  EXPECT_TRUE(mine.grad().equal(torch::full({4}, Sum(), On())));
}

TEST_F(GpuCollectivesTest, TheHostHereAndAGpuThereIsAMismatch) {
  if (size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  try {
    allreduce(rank() == 0 ? torch::ones({2}, On()) : torch::ones({2}), SumOf("m"));
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("on a GPU on rank 0"));
  }
}

// CUDA's functions for graphs, of the library that LibTorch has loaded.
template <class... Arguments>
int CallCuda(const char* function, Arguments... arguments) {
  using Function = int (*)(Arguments...);
  const auto call = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, function));
  if (call == nullptr) throw std::runtime_error(dlerror());
  return call(arguments...);
}

TEST_F(GpuCollectivesTest, ACaptureIsRefusedAndAGraphWithoutCollectivesRunsBetweenThem) {
  constexpr int kThreadLocal = 1;  // cudaStreamCaptureModeThreadLocal
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const c10::StreamGuard other(guard.getStreamFromGlobalPool(device()));
  void* const stream = guard.getStreamNativeHandle(other.current_stream());
  torch::Tensor values = torch::ones({1000}, On());
  allreduce_(values, SumOf("before"));
  guard.synchronizeStream(other.current_stream());

  // One rank captures, and all are refused.
  void* refused = nullptr;
  if (rank() == 0) {
    ASSERT_EQ(CallCuda("cudaStreamBeginCapture", stream, kThreadLocal), 0);
  }
  try {
    allreduce_(values, SumOf("captured"));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("CUDA graph"));
  }
  if (rank() == 0) {
    ASSERT_EQ(CallCuda("cudaStreamEndCapture", stream, &refused), 0);
    ASSERT_EQ(CallCuda("cudaGraphDestroy", refused), 0);
  }

  // A step of a graph, and what it has computed is reduced behind it.
  void* graph = nullptr;
  void* ready = nullptr;
  ASSERT_EQ(CallCuda("cudaStreamBeginCapture", stream, kThreadLocal), 0);
  values.mul_(3);
  ASSERT_EQ(CallCuda("cudaStreamEndCapture", stream, &graph), 0);
  ASSERT_EQ(CallCuda("cudaGraphInstantiateWithFlags", &ready, graph, 0ULL), 0);
  for (int step = 0; step < 3; ++step) {
    ASSERT_EQ(CallCuda("cudaGraphLaunch", ready, stream), 0);
    allreduce_(values, SumOf("after"));
  }
  EXPECT_TRUE(values.equal(torch::full({1000}, 27 * std::pow(size(), 4), On())));
  ASSERT_EQ(CallCuda("cudaGraphExecDestroy", ready), 0);
  ASSERT_EQ(CallCuda("cudaGraphDestroy", graph), 0);
}

}  // namespace
}  // namespace sirtaki::tests
