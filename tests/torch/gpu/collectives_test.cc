// The public collectives with tensors on GPUs: fakes, which keep streams and events as real ones
// do. Threads are the ranks.
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "frameworks/torch/calls/gpu_tensors.h"
#include "sirtaki/torch.h"
#include "tests/torch/gpu/gpu_ranks.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::StreamHandle;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

AllreduceOptions Sum(const std::string& name) {
  return AllreduceOptions().name(name).op(ReduceOp::Sum);
}

using Rank = GpuRank;

class GpuCollectivesTest : public GpuRanksTest {};

TEST_F(GpuCollectivesTest, InPlaceAndStreamsWaitButNotTheHost) {
  std::atomic<bool> open{false};
  std::barrier both(2);
  RunRanks(2, [&](Rank& rank) {
    Floats memory = {0, 0, 0};
    const at::Tensor tensor = rank.Tensor(memory);
    const Floats made(3, static_cast<float>(rank.number() + 1));
    // What a lane takes for its first collective would wait for the device.
    EXPECT_EQ(rank.Read(allreduce(tensor, Sum("first"))), memory);
    // What the backward pass writes is in the stream, and not in the memory yet.
    gpus_.PutGate(rank.stream(), open);
    gpus_.PutCopy(rank.stream(), memory.data(), made.data(), 12);
    const Handle handle = allreduce_async_(tensor, Sum("w"));
    // Whichever stream is current where it is asked for finds the result.
    std::vector<Floats> found(2, Floats(3, -1));
    for (Floats& values : found) {
      const StreamHandle stream = gpus_.MakeStream();
      SetCurrentStream(rank.device(), stream);
      EXPECT_TRUE(synchronize(handle).is_same(tensor));
      gpus_.PutCopy(stream, values.data(), memory.data(), 12);
    }
    gpus_.RunDevices();
    EXPECT_THAT(found, Each(Floats(3, -1)));
    both.arrive_and_wait();
    open = true;
    EXPECT_EQ(rank.Read(tensor), Floats(3, 3));
    gpus_.RunDevices();
    EXPECT_THAT(found, Each(Floats(3, 3)));
  });
}

TEST_F(GpuCollectivesTest, EachKindGivesItsResult) {
  RunRanks(2, [&](Rank& rank) {
    const auto number = static_cast<float>(rank.number());
    Floats memory = {number, number + 10};
    const at::Tensor tensor = rank.Tensor(memory);
    const at::Tensor sum = allreduce(tensor, Sum("sum"));
    EXPECT_EQ(sum.device(), Cuda(rank.device()));
    EXPECT_EQ(rank.Read(sum), Floats({1, 21}));
    EXPECT_EQ(rank.Read(tensor), Floats({number, number + 10}));
    EXPECT_EQ(rank.Read(allreduce(tensor, AllreduceOptions().name("average"))),
              Floats({0.5F, 10.5F}));
    EXPECT_EQ(rank.Read(allreduce(tensor, Sum("scaled").prescale(2).postscale(3))),
              Floats({6, 126}));
    EXPECT_EQ(rank.Read(reducescatter(tensor, ReducescatterOptions().op(ReduceOp::Sum))),
              Floats({rank.number() == 0 ? 1.0F : 21.0F}));
    const at::Tensor all = allgather_into(tensor);
    EXPECT_EQ(rank.Read(all), Floats({0, 10, 1, 11}));
    Floats to_fill = memory;
    EXPECT_EQ(rank.Read(broadcast_(rank.Tensor(to_fill), 1)), Floats({1, 11}));
  });
}

TEST_F(GpuCollectivesTest, WhatArrivesBelongsToTheLaneAndWaitsForItsUser) {
  RunRanks(2, [&](Rank& rank) {
    Floats memory(static_cast<std::size_t>(rank.number() + 1), static_cast<float>(rank.number()));
    const at::Tensor all = allgather(rank.Tensor(memory));
    EXPECT_EQ(rank.Read(all), Floats({0, 1, 1}));
    EXPECT_THAT(gpus_.calls("ncclSend rank " + std::to_string(rank.number())),
                Contains(EndsWith(" stream " + std::to_string(gpus_.NumberOf(AllocatedOn(all))))));
    EXPECT_THAT(RecordedOn(all), Contains(rank.stream()));
    Floats two = {5, 6};
    const AlltoallResult exchanged = alltoall(rank.Tensor(two));
    EXPECT_EQ(rank.Read(exchanged.tensor), rank.number() == 0 ? Floats({5, 5}) : Floats({6, 6}));
    EXPECT_THAT(exchanged.received_splits, ElementsAre(1, 1));
  });
}

TEST_F(GpuCollectivesTest, AnOutputThatCannotBeAllocatedIsToldToAllInOneLine) {
  std::vector<Floats> memories(2, Floats(1));  // a device may read it when its rank is through
  RunRanks(2, [&](Rank& rank) {
    const at::Tensor tensor = rank.Tensor(memories[static_cast<std::size_t>(rank.number())]);
    if (rank.number() == 1) FailNextAllocation("CUDA out of memory");
    std::string text;
    try {
      allgather(tensor);
      // The other's failure comes after the launch here.
      while (detail::CurrentSession()->Check().ok()) std::this_thread::yield();
      text = detail::CurrentSession()->Check().message();
    } catch (const Error& error) {
      text = error.what();
    }
    EXPECT_THAT(text, HasSubstr("CUDA out of memory"));
    EXPECT_THAT(text, Not(HasSubstr("\n")));
    EXPECT_THAT(text, Not(HasSubstr("Exception raised from")));
  });
}

TEST_F(GpuCollectivesTest, AllocatingForAStreamEndsWhereItIsNoMore) {
  const StreamHandle own = gpus_.MakeStream();
  const StreamHandle lanes = gpus_.MakeStream();
  SetCurrentStream(1, own);
  const auto allocate = [lanes] {
    const detail::AllocatingStream of_lane(Cuda(1), lanes);
    return at::empty({2}, at::TensorOptions().device(Cuda(1)));
  };
  EXPECT_EQ(AllocatedOn(allocate()), lanes);
  EXPECT_EQ(CurrentStreamOf(1), own);
  FailNextAllocation("CUDA out of memory");
  EXPECT_THROW(allocate(), c10::Error);
  EXPECT_EQ(CurrentStreamOf(1), own);
}

TEST_F(GpuCollectivesTest, AGroupMixesTheHostAndTheGpu) {
  RunRanks(2, [&](Rank& rank) {
    Floats a = {1, 2};
    Floats b = {3};
    const at::Tensor on_host = torch::ones({4});
    const std::vector<at::Tensor> tensors = {rank.Tensor(a), on_host, rank.Tensor(b)};
    const auto handle = grouped_allreduce_async_(tensors, Sum("group"));
    EXPECT_EQ(synchronize(handle).size(), 3u);
    EXPECT_EQ(rank.Read(tensors[0]), Floats({2, 4}));
    EXPECT_EQ(rank.Read(tensors[2]), Floats({6}));
    EXPECT_TRUE(on_host.equal(torch::full({4}, 2)));
  });
}

TEST_F(GpuCollectivesTest, AGroupHasOneEventForAllOfItsInputs) {
  RunRanks(2, [&](Rank& rank) {
    Floats a = {1, 2};
    Floats b = {3};
    const auto sums = grouped_allreduce({rank.Tensor(a), rank.Tensor(b)}, Sum("group"));
    const std::string stream = " stream " + std::to_string(gpus_.NumberOf(rank.stream()));
    EXPECT_THAT(gpus_.calls("cudaEventRecord"), Contains(EndsWith(stream)).Times(1));
    EXPECT_EQ(rank.Read(sums[0]), Floats({2, 4}));
    EXPECT_EQ(rank.Read(sums[1]), Floats({6}));
  });
}

TEST_F(GpuCollectivesTest, ACallThatIsWrongOnOneRankTakesItsSlotAsOnTheOthers) {
  std::vector<Floats> memories(2, Floats(2));
  RunRanks(2, [&](Rank& rank) {
    Floats& memory = memories[static_cast<std::size_t>(rank.number())];
    const int first = 2 * rank.number();
    // Its elements share memory on one rank.
    const at::Tensor wrong = OnCuda(first, memory, {2}, {rank.number() == 0 ? 0 : 1});
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { allreduce_(wrong, Sum("w")); }),
                HasSubstr("share memory"));
    EXPECT_NO_THROW(allreduce_(OnCuda(first + 1, memory), Sum("x")));
  });
}

TEST_F(GpuCollectivesTest, ParametersHaveTheirSlotsInTheirOrder) {
  std::vector<Floats> memories(4, Floats(1));
  RunRanks(2, [&](Rank& rank) {
    std::vector<at::Tensor> parameters;
    for (const int device : {2 * rank.number(), 2 * rank.number() + 1}) {
      parameters.push_back(OnCuda(device, memories[static_cast<std::size_t>(device)]));
    }
    std::vector<ProcessSet> alone;
    for (const int number : {0, 1}) alone.push_back(add_process_set({number}));
    const auto number = static_cast<std::size_t>(rank.number());
    broadcast_parameters(parameters, rank.number(), alone[number]);  // moves nothing
    std::vector<Handle> handles;
    for (const std::size_t i : {number, 1 - number}) {
      handles.push_back(allreduce_async_(parameters[i], Sum("w" + std::to_string(i))));
    }
    for (const Handle& handle : handles) EXPECT_NO_THROW(synchronize(handle));
  });
}

TEST_F(GpuCollectivesTest, TheHostHereAndAGpuThereIsAMismatch) {
  RunRanks(2, [&](Rank& rank) {
    Floats memory = {1};
    const at::Tensor tensor = rank.number() == 0 ? rank.Tensor(memory) : torch::ones({1});
    const std::string text = ErrorOf(ErrorCode::Mismatch, [&] { allreduce(tensor, Sum("w")); });
    EXPECT_THAT(text, HasSubstr("\"w\""));
    EXPECT_THAT(text, HasSubstr("on a GPU on rank 0"));
    EXPECT_THAT(text, HasSubstr("on the host on rank 1"));
  });
}

TEST_F(GpuCollectivesTest, ACaptureIsRefusedOnAllRanks) {
  RunRanks(2, [&](Rank& rank) {
    if (rank.number() == 0) gpus_.SetCapturing(rank.stream());
    Floats memory = {1};
    EXPECT_THAT(
        ErrorOf(ErrorCode::InvalidArgument, [&] { allreduce_(rank.Tensor(memory), Sum("w")); }),
        HasSubstr("CUDA graph"));
  });
}

TEST_F(GpuCollectivesTest, AGpuThatCannotBeUsedIsToldToAll) {
  RunRanks(
      2,
      [&](Rank& rank) {
        Floats memory = {1};
        EXPECT_THAT(
            ErrorOf(ErrorCode::InvalidArgument, [&] { allreduce_(rank.Tensor(memory), Sum("w")); }),
            HasSubstr("the tensor is on cuda:"));
        EXPECT_NO_THROW(allreduce(torch::ones({1}), Sum("h")));
      },
      [](session::GpuLibraries& libraries) {
        libraries.open_device = [](int, std::shared_ptr<ops::cuda::Device>*) {
          return core::Status(core::StatusCode::kUnsupported, "no CUDA runtime");
        };
      });
  EXPECT_THAT(gpus_.devices_with_context(), IsEmpty());
}

TEST_F(GpuCollectivesTest, ALoneRankCopiesInItsStream) {
  RunRanks(1, [&](Rank& rank) {
    Floats memory = {1, 2};
    const at::Tensor tensor = rank.Tensor(memory);
    EXPECT_EQ(rank.Read(allreduce(tensor, Sum("w").prescale(3))), Floats({3, 6}));
    EXPECT_EQ(rank.Read(allgather(tensor)), Floats({1, 2}));
    EXPECT_EQ(rank.Read(allreduce_(tensor, Sum("w"))), Floats({1, 2}));
  });
  EXPECT_THAT(gpus_.calls("nccl"), IsEmpty());
}

}  // namespace
}  // namespace sirtaki::tests
