// Results of the collectives on GPUs in streams of every kind, and what becomes of their memory.
// The GPUs are fakes; threads are the ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "sirtaki/torch.h"
#include "tests/torch/gpu/gpu_ranks.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::StreamHandle;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

AllreduceOptions StreamSum(const std::string& name) {
  return AllreduceOptions().name(name).op(ReduceOp::Sum);
}

class GpuStreamsTest : public GpuRanksTest {
 protected:
  // The calling thread's from now on.
  StreamHandle EnterNewStream(const GpuRank& rank) {
    const StreamHandle stream = gpus_.MakeStream();
    SetCurrentStream(rank.device(), stream);
    return stream;
  }

  // The tensor's bytes as they are when the current stream comes here.
  void ReadLater(const GpuRank& rank, const at::Tensor& tensor, Floats* values) {
    gpus_.PutCopy(CurrentStreamOf(rank.device()), values->data(), tensor.const_data_ptr(),
                  values->size() * sizeof(float));
  }

  // When it returns, the lane has come past all that it was given before, and so has whatever
  // waited for nothing but that.
  void PassTheLane(GpuRank& rank) {
    const StreamHandle before = CurrentStreamOf(rank.device());
    EnterNewStream(rank);
    Floats one = {1};
    EXPECT_EQ(rank.Read(allreduce(rank.Tensor(one), StreamSum("last"))), Floats({2}));
    gpus_.RunDevices();
    SetCurrentStream(rank.device(), before);
  }

  // When it returns, all but so many of the blocks on the rank's GPU are freed, and what was not
  // recorded is overwritten.
  void AwaitFrees(const GpuRank& rank, int but) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (LiveBlocksOn(rank.device()) > but && std::chrono::steady_clock::now() < limit) {
      std::this_thread::yield();
    }
    EXPECT_EQ(LiveBlocksOn(rank.device()), but);
    gpus_.RunDevices();
  }
};

// [2, 3] in memory that is [3, 2]: 1 to 6, times a factor.
at::Tensor Transposed(const GpuRank& rank, Floats& memory) {
  return OnCuda(rank.device(), memory, {2, 3}, {1, 2});
}
Floats OneToSix(int factor) {
  Floats values;
  for (int i = 1; i <= 6; ++i) values.push_back(static_cast<float>(i * factor));
  return values;
}

TEST_F(GpuStreamsTest, WhatIsWrittenBackInOneStreamIsThereInEveryOther) {
  RunRanks(2, [&](GpuRank& rank) {
    Floats memory = OneToSix(rank.number() + 1);
    const Handle handle = allreduce_async_(Transposed(rank, memory), StreamSum("w"));
    std::atomic<bool> open{false};
    gpus_.PutGate(EnterNewStream(rank), open);
    synchronize(handle);  // writes it back behind the gate
    EnterNewStream(rank);
    Floats found(6, -1);
    const at::Tensor result = synchronize(handle);
    ReadLater(rank, result, &found);
    PassTheLane(rank);
    EXPECT_EQ(found, Floats(6, -1));
    open = true;
    rank.Read(result);
    EXPECT_EQ(found, OneToSix(3));
  });
}

TEST_F(GpuStreamsTest, WhatIsWrittenBackIsKeptUntilItIs) {
  RunRanks(2, [&](GpuRank& rank) {
    const int before = LiveBlocksOn(rank.device());
    Floats memory = OneToSix(rank.number() + 1);
    Handle handle = allreduce_async_(Transposed(rank, memory), StreamSum("w"));
    std::atomic<bool> open{false};
    gpus_.PutGate(EnterNewStream(rank), open);
    const at::Tensor result = synchronize(handle);
    handle = {};
    AwaitFrees(rank, before);  // in the stream of the call, to which the copy belongs
    open = true;
    rank.Read(result);
    EXPECT_EQ(memory, OneToSix(3));
  });
}

TEST_F(GpuStreamsTest, AResultIsKeptForTheStreamThatItWasGivenTo) {
  RunRanks(2, [&](GpuRank& rank) {
    const int before = LiveBlocksOn(rank.device());
    Floats memory = {1, 2};
    Handle handle = allreduce_async(rank.Tensor(memory), StreamSum("w"));
    std::atomic<bool> open{false};
    const StreamHandle user = EnterNewStream(rank);
    gpus_.PutGate(user, open);
    Floats found(2, -1);
    {
      const at::Tensor sum = synchronize(std::exchange(handle, {}));
      EXPECT_NE(AllocatedOn(sum), user);
      EXPECT_THAT(RecordedOn(sum), Contains(user));
      ReadLater(rank, sum, &found);
    }
    AwaitFrees(rank, before);
    open = true;
    Floats end(1);
    rank.Read(rank.Tensor(end));
    EXPECT_EQ(found, Floats({2, 4}));
  });
}

TEST_F(GpuStreamsTest, InOneStreamNothingIsRecorded) {
  RunRanks(2, [&](GpuRank& rank) {
    Floats memory = {1, 2};
    const at::Tensor sum = allreduce(rank.Tensor(memory), StreamSum("w"));
    EXPECT_EQ(AllocatedOn(sum), rank.stream());
    EXPECT_THAT(RecordedOn(sum), IsEmpty());
    EXPECT_EQ(rank.Read(sum), Floats({2, 4}));  // until then the device reads `memory`
  });
}

TEST_F(GpuStreamsTest, ABroadcastLeavesItsRootsTensorAsItIs) {
  RunRanks(2, [&](GpuRank& rank) {
    Floats memory = OneToSix(rank.number() + 1);
    const at::Tensor all = broadcast(Transposed(rank, memory), 1);
    EXPECT_TRUE(all.is_contiguous());
    EXPECT_EQ(rank.Read(all), Floats({2, 6, 10, 4, 8, 12}));
    EXPECT_EQ(memory, OneToSix(rank.number() + 1));
  });
}

TEST_F(GpuStreamsTest, TheInputGoesWithTheEndOfTheOperation) {
  RunRanks(2, [&](GpuRank& rank) {
    std::atomic<bool> gone{false};
    Floats memory = {1, 2};
    const Handle handle =
        allreduce_async(OnCuda(rank.device(), memory, [&gone] { gone = true; }), StreamSum("w"));
    EXPECT_EQ(rank.Read(synchronize(handle)), Floats({2, 4}));
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!gone && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
    EXPECT_TRUE(gone);
  });
}

TEST_F(GpuStreamsTest, AFaultAfterTheLaunchIsToldToWhoeverWaits) {
  std::barrier both(2);
  gpus_.Hold();
  RunRanks(2, [&](GpuRank& rank) {
    Floats memory = {1, 2};
    const Handle handle = allreduce_async_(rank.Tensor(memory), StreamSum("w"));
    synchronize(handle);  // launched; no device has begun
    both.arrive_and_wait();
    if (rank.number() == 1) abort("enough");
    while (detail::CurrentSession()->Check().ok()) std::this_thread::yield();
    EXPECT_THAT(ErrorOf(ErrorCode::Aborted, [&] { synchronize(handle); }), HasSubstr("enough"));
    EXPECT_TRUE(poll(handle));  // it has ended, well or badly
    both.arrive_and_wait();
  });
}

TEST_F(GpuStreamsTest, AWaitInACaptureIsRefusedAndLeavesItAlone) {
  RunRanks(2, [&](GpuRank& rank) {
    Floats memory = OneToSix(rank.number() + 1);
    const at::Tensor tensor = Transposed(rank, memory);
    const Handle handle = allreduce_async_(tensor, StreamSum("w"));
    const StreamHandle captured = EnterNewStream(rank);
    const std::string number = std::to_string(gpus_.NumberOf(captured));
    gpus_.SetCapturing(captured);
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { synchronize(handle); }),
                  HasSubstr("CUDA graph"));
    }
    // A new call: the copy of its tensor would be in the graph.
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { allreduce(tensor, StreamSum("x")); }),
                HasSubstr("CUDA graph"));
    gpus_.SetCapturing(captured, false);
    EXPECT_THAT(gpus_.calls("copy_"), Not(Contains("copy_ stream " + number)));
    EXPECT_THAT(gpus_.calls("cudaStreamWaitEvent"),
                Not(Contains(HasSubstr("stream " + number + " event"))));
    // It can be asked for afterwards.
    rank.Read(synchronize(handle));
    EXPECT_EQ(memory, OneToSix(3));
  });
}

}  // namespace
}  // namespace sirtaki::tests
