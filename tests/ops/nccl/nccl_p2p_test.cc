// Messages of tensors on GPUs, which are fakes: through pinned memory of the host, in the order of
// their calls, and not before the tensors are made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/message_rank.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::OpKind;
using core::Status;
using core::StatusCode;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using tests::OnDevice;

using tests::Of;
using Place = tests::MessagePlace;
using Rank = tests::MessageRank;

class NcclP2pTest : public tests::MessageRanksTest {};

TEST_F(NcclP2pTest, ArriveInOrderForEachPeerAndTagWhereverTheyAre) {
  for (const int size : {1, 2, 3}) {
    RunRanks(size, [size](Rank& self, int rank) {
      const auto place = [](int a, int b) { return (a + b) % 3 == 0 ? Place::kHost : Place::kGpu; };
      std::vector<core::WorkPtr> sends;
      for (int to = 0; to < size; ++to) {
        for (int i = 0; i < 12; ++i) {
          sends.push_back(
              self.Send(to, i % 2, Of(i % 4, 1000 * rank + 100 * to + i), place(i, rank)));
        }
      }
      for (int from = size - 1; from >= 0; --from) {
        std::vector<core::WorkPtr> receives;
        for (int i = 0; i < 12; ++i) {
          receives.push_back(self.Receive(from, i % 2, i % 4, place(i, 1 - rank)));
        }
        for (int i = 0; i < 12; ++i) {
          const core::WorkPtr& receive = receives[static_cast<std::size_t>(i)];
          const Status status = self.Finish(receive);
          EXPECT_TRUE(status.ok()) << status.ToString();
          EXPECT_EQ(Rank::Held(receive), Of(i % 4, 1000 * from + 100 * rank + i));
        }
      }
      for (const core::WorkPtr& send : sends) EXPECT_TRUE(self.Finish(send).ok());
      EXPECT_FALSE(self.device().lanes().NeedsStepping());
      EXPECT_THAT(self.device().lanes().Running(), IsEmpty());
    });
  }
  EXPECT_THAT(gpus_.calls("nccl"), IsEmpty());
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(NcclP2pTest, NeedNoKernels) {
  RunRanks(
      2,
      [](Rank& self, int rank) {
        const core::WorkPtr send = self.Send(1 - rank, 0, Of(3, rank));
        const core::WorkPtr receive = self.Receive(1 - rank, 0, 3);
        EXPECT_TRUE(self.Finish(receive).ok());
        EXPECT_EQ(Rank::Held(receive), Of(3, 1 - rank));
        EXPECT_TRUE(self.Finish(send).ok());
      },
      [](int, LanesOptions& options) { options.kernels = nullptr; });
}

// Behind it others of its line wait, on the GPU and on the host; those of another line do not.
TEST_F(NcclP2pTest, ASendWaitsForItsTensor) {
  std::atomic<bool> open{false};
  std::barrier both(2);
  RunRanks(2, [&](Rank& self, int rank) {
    if (rank == 1) {
      const std::vector<core::WorkPtr> receives = {self.Receive(0, 0, 2), self.Receive(0, 0, 2),
                                                   self.Receive(0, 0, 2, Place::kHost)};
      EXPECT_TRUE(self.Finish(self.Receive(0, 1, 1)).ok());
      for (int i = 0; i < 100; ++i) self.Step();
      for (const core::WorkPtr& receive : receives) EXPECT_FALSE(receive->handle->done());
      both.arrive_and_wait();
      for (std::size_t i = 0; i < receives.size(); ++i) {
        EXPECT_TRUE(self.Finish(receives[i]).ok());
        // The first was written behind the gate.
        EXPECT_EQ(Rank::Held(receives[i]), Of(2, i == 0 ? 0x07070707 : static_cast<int>(i)));
      }
      return;
    }
    // What the device is to make is not there when the message is sent.
    tests::Values made = Of(2, 5);
    gpus_.PutGate(self.device().producer(), open);
    gpus_.PutWrite(self.device().producer(), made.data(), 7, 8);
    core::RunItem item;
    item.work = std::make_shared<core::Work>();
    item.work->request.asked =
        std::make_shared<const core::Signature>(core::Signature{.kind = OpKind::kSend,
                                                                .dtype = DType::kI32,
                                                                .device = core::DeviceKind::kCuda,
                                                                .shape = {2}});
    item.work->peer = 1;
    item.work->input = made.data();
    item.work->handle = std::make_shared<core::HandleState>();
    const core::WorkPtr late = self.device().OnDevice(std::move(item)).work;
    self.device().lanes().StartP2p(late, core::Clock::now());
    const core::WorkPtr second = self.Send(1, 0, Of(2, 1));
    const core::WorkPtr third = self.Send(1, 0, Of(2, 2), Place::kHost);
    EXPECT_TRUE(self.Finish(self.Send(1, 1, {9}, Place::kHost)).ok());
    EXPECT_FALSE(late->handle->done());
    EXPECT_FALSE(third->handle->done());
    both.arrive_and_wait();
    open = true;
    for (const core::WorkPtr& send : {late, second, third}) EXPECT_TRUE(self.Finish(send).ok());
  });
}

TEST_F(NcclP2pTest, AReceiveIsDoneWhenItsCopyIsLaunched) {
  gpus_.Hold();
  RunRanks(1, [&](Rank& self, int) {
    const core::WorkPtr send = self.Send(0, 0, Of(4, 3), Place::kHost);
    const core::WorkPtr receive = self.Receive(0, 0, 4);
    while (!receive->handle->done()) self.Step();
    ASSERT_TRUE(receive->handle->status().ok());
    EXPECT_EQ(Rank::Held(receive), Of(4, -1));
    gpus_.Release();
    EXPECT_TRUE(self.Finish(receive).ok());
    EXPECT_EQ(Rank::Held(receive), Of(4, 3));
    EXPECT_TRUE(self.Finish(send).ok());
  });
}

// What is still read where it is received is not overwritten.
TEST_F(NcclP2pTest, AReceiveComesBehindWhatItsTensorWasUsedFor) {
  std::atomic<bool> open{false};
  RunRanks(1, [&](Rank& self, int) {
    self.TakePinnedMemory();
    gpus_.PutGate(self.device().producer(), open);
    const core::WorkPtr receive = self.Receive(0, 0, 4);
    EXPECT_TRUE(self.Finish(self.Send(0, 0, Of(4, 3), Place::kHost)).ok());
    while (!receive->handle->done()) self.Step();
    gpus_.RunDevices();
    EXPECT_EQ(Rank::Held(receive), Of(4, -1));
    open = true;
    EXPECT_TRUE(self.Finish(receive).ok());
    EXPECT_EQ(Rank::Held(receive), Of(4, 3));
  });
}

// Not even if the lane that would reduce waits for other ranks.
TEST_F(NcclP2pTest, DoNotWaitForCollectives) {
  std::barrier both(2);
  const RunCase sum = OnDevice({.signature = {.shape = {40}}});
  RunRanks(2, [&](Rank& self, int rank) {
    RunSide side;
    const auto start = [&] {
      self.device().Start({self.device().OnDevice(side.MakeItem(sum, "w", rank, 2))});
    };
    if (rank == 0) start();
    const core::WorkPtr send = self.Send(1 - rank, 0, Of(3, rank));
    const core::WorkPtr receive = self.Receive(1 - rank, 0, 3);
    EXPECT_TRUE(self.Finish(receive).ok());
    EXPECT_TRUE(self.Finish(send).ok());
    both.arrive_and_wait();
    if (rank == 1) start();
    self.device().RunToIdle();
    side.Check(sum, rank, 2);
  });
}

TEST_F(NcclP2pTest, AnotherShapeIsAMismatchOfTheReceiveAlone) {
  RunRanks(2, [](Rank& self, int rank) { ExpectMismatchOfTheSecond(self, rank, 2); });
}

TEST_F(NcclP2pTest, PinnedMemoryServesAgain) {
  RunRanks(1, [&](Rank& self, int) {
    for (int i = 0; i < 10; ++i) {
      const core::WorkPtr send = self.Send(0, 0, Of(700 + i, i));
      const core::WorkPtr receive = self.Receive(0, 0, 700 + i);
      EXPECT_TRUE(self.Finish(receive).ok());
      EXPECT_TRUE(self.Finish(send).ok());
      EXPECT_EQ(Rank::Held(receive), Of(700 + i, i));
    }
  });
  // One each way; more only where a thread was late to give one back.
  EXPECT_GE(gpus_.calls("cudaHostAlloc").size(), 1u);
  EXPECT_LE(gpus_.calls("cudaHostAlloc").size(), 4u);
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(NcclP2pTest, ASessionMayEndWithoutThem) {
  RunRanks(2, [](Rank& self, int rank) {
    const core::WorkPtr receive = self.Receive(1 - rank, 0, 4);
    const core::WorkPtr send = self.Send(1 - rank, 1, Of(4, 3));
    EXPECT_TRUE(self.device().lanes().Idle());
    self.device().EndLanes();
    EXPECT_EQ(receive->handle->status().code(), StatusCode::kShutDown);
    EXPECT_EQ(send->handle->status().code(), StatusCode::kShutDown);
  });
}

TEST_F(NcclP2pTest, AbandonCompletesThem) {
  std::atomic<bool> open{false};
  RunRanks(1, [&](Rank& self, int) {
    self.TakePinnedMemory();
    gpus_.Forget();
    gpus_.PutGate(self.device().producer(), open);
    const core::WorkPtr send = self.Send(0, 0, Of(4, 3));
    const core::WorkPtr receive = self.Receive(0, 1, 4);
    while (gpus_.calls("cudaMemcpyAsync").empty()) self.Step();
    const Status why(StatusCode::kPeerLost, "rank 3 is lost");
    self.device().lanes().Abandon(why);
    // Their own thread may be the one that ends them, a moment later.
    EXPECT_EQ(self.Finish(send), why);
    EXPECT_EQ(self.Finish(receive), why);
    EXPECT_EQ(self.Send(0, 0, Of(4, 3))->handle->status(), why);
    open = true;
    self.device().EndLanes();
  });
}

// What a device that has not come there may still read or write is not given to anybody else.
TEST_F(NcclP2pTest, WhatADeviceIsStuckInIsLeftToIt) {
  static std::atomic<bool> never{false};
  RunRanks(1, [&](Rank& self, int) {
    self.TakePinnedMemory();
    gpus_.Forget();
    gpus_.PutGate(self.device().producer(), never);
    const core::WorkPtr send = self.Send(0, 0, Of(4, 3));
    while (gpus_.calls("cudaMemcpyAsync").empty()) self.Step();
    self.device().lanes().Abandon({StatusCode::kAborted, "enough"});
    self.device().EndLanes();
  });
  EXPECT_THAT(gpus_.calls("cudaFreeHost"), IsEmpty());
  EXPECT_EQ(gpus_.live_allocations(), 1);
}

// The copy is under way, though nobody can say how far it is.
TEST_F(NcclP2pTest, WhatAFailedDeviceMayStillReadStays) {
  InprocWorld world(1);
  Rank self(gpus_, world, 0);
  const core::WorkPtr receive = self.Receive(0, 0, 2);
  gpus_.FailNext("cudaEventRecord", 700);
  const core::WorkPtr send = self.Send(0, 0, {1, 2}, Place::kHost);
  const Status status = self.Finish(receive);
  EXPECT_THAT(status.message(), HasSubstr("cudaEventRecord"));
  self.device().lanes().Abandon(status);  // as the engine does
  self.device().EndLanes();
  EXPECT_THAT(gpus_.calls("cudaFreeHost"), IsEmpty());
  EXPECT_EQ(gpus_.live_allocations(), 1);
}

TEST_F(NcclP2pTest, AFailureOfTheDeviceIsTheGroupsFault) {
  const std::vector<std::pair<std::string, int>> failures = {
      {"cudaMemcpyAsync", 700}, {"cudaHostAlloc", 2}, {"cudaStreamCreateWithPriority", 1}};
  for (const auto& [function, error] : failures) {
    for (const OpKind kind : {OpKind::kSend, OpKind::kReceive}) {
      InprocWorld world(1);
      Rank self(gpus_, world, 0);
      gpus_.FailNext(function, error);
      const bool sends = kind == OpKind::kSend;
      const core::WorkPtr one = sends ? self.Send(0, 5, {1, 2}) : self.Receive(0, 5, 2);
      const core::WorkPtr other =
          sends ? self.Receive(0, 5, 2, Place::kHost) : self.Send(0, 5, {1, 2}, Place::kHost);
      const Status status = self.Finish(one);
      EXPECT_THAT(status.message(), HasSubstr(function));
      EXPECT_THAT(status.message(),
                  HasSubstr(sends ? "send to rank 0, tag 5" : "receive from rank 0, tag 5"));
      EXPECT_EQ(status.origin().rank, 0);
      EXPECT_EQ(self.device().failure(), status);
      EXPECT_EQ(self.device().failed_tensor(), "m1");
      self.device().lanes().Abandon(status);  // as the engine does
      EXPECT_TRUE(other->handle->done());
    }
  }
}

}  // namespace
}  // namespace sirtaki::ops
