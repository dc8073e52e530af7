// What the NCCL of FakeGpus refuses: the rules of the real one that a program would break unseen.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "ops/nccl/nccl_api.h"
#include "tests/support/fake_gpus.h"
#include "tests/support/rank_threads.h"

namespace sirtaki::ops::nccl {
namespace {

using tests::FakeGpus;
using tests::RankThreads;

// Ranks that call NCCL's table themselves.
class FakeNcclTest : public ::testing::Test {
 protected:
  UniqueId Id() {
    UniqueId id;
    EXPECT_EQ(api_.GetUniqueId(&id), Result::kSuccess);
    return id;
  }
  // How the last call has gone, without waiting for it.
  Result Ask(CommHandle comm) {
    Result result = Result::kInternalError;
    EXPECT_EQ(api_.CommGetAsyncError(comm, &result), Result::kSuccess);
    return result;
  }
  Result Await(CommHandle comm) {
    Result result = Result::kInProgress;
    while ((result = Ask(comm)) == Result::kInProgress) std::this_thread::yield();
    return result;
  }
  CommHandle Begin(const UniqueId& id, int size, int rank, int device = 0) {
    CommHandle comm = nullptr;
    gpus_.cuda().SetDevice(device);
    Config config;
    EXPECT_EQ(api_.CommInitRankConfig(&comm, size, id, rank, &config), Result::kInProgress);
    return comm;
  }
  CommHandle Alone() {
    CommHandle comm = Begin(Id(), 1, 0);
    EXPECT_EQ(Await(comm), Result::kSuccess);
    return comm;
  }
  Result Sum(CommHandle comm, cuda::StreamHandle stream) {
    return api_.AllReduce(&value_, &value_, 1, DataType::kFloat32, RedOp::kSum, comm, stream);
  }

  FakeGpus gpus_;
  Api& api_ = gpus_.nccl();
  float value_ = 1;
};
using FakeNcclDeathTest = FakeNcclTest;

TEST_F(FakeNcclTest, ACommunicatorThatIsInProgressTakesNoCall) {
  CommHandle comm = Begin(Id(), 1, 0);
  cuda::StreamHandle stream = gpus_.MakeStream();
  EXPECT_EQ(Sum(comm, stream), Result::kInvalidArgument);  // it is being made
  ASSERT_EQ(Await(comm), Result::kSuccess);
  gpus_.AnswerInProgress(1);
  EXPECT_EQ(Sum(comm, stream), Result::kInProgress);
  EXPECT_EQ(Sum(comm, stream), Result::kInvalidArgument);
  EXPECT_EQ(api_.CommFinalize(comm), Result::kInvalidArgument);
  EXPECT_EQ(Ask(comm), Result::kInProgress);
  EXPECT_EQ(Ask(comm), Result::kSuccess);
  gpus_.AnswerInProgress(0);
  EXPECT_EQ(Sum(comm, stream), Result::kSuccess);
}

TEST_F(FakeNcclDeathTest, NothingGoesIntoAStreamThatNcclIsLaunchingInto) {
  CommHandle comm = Alone();
  CommHandle other = Alone();
  cuda::StreamHandle stream = gpus_.MakeStream();
  cuda::EventHandle event = nullptr;
  gpus_.cuda().EventCreateWithFlags(&event, 0);
  gpus_.AnswerInProgress(1);
  ASSERT_EQ(Sum(comm, stream), Result::kInProgress);
  char byte = 0;
  EXPECT_DEATH(gpus_.cuda().EventRecord(event, stream), "cudaEventRecord goes to stream .*, into");
  EXPECT_DEATH(gpus_.cuda().MemsetAsync(&byte, 1, 1, stream), "cudaMemsetAsync goes to stream");
  EXPECT_DEATH(gpus_.PutWrite(stream, &byte, 1, 1), "a program's work goes to stream");
  EXPECT_DEATH(Sum(other, stream), "a collective goes to stream");
  EXPECT_EQ(gpus_.cuda().EventRecord(event, gpus_.MakeStream()), cuda::Error::kSuccess);
  ASSERT_EQ(Await(comm), Result::kSuccess);
  EXPECT_EQ(gpus_.cuda().EventRecord(event, stream), cuda::Error::kSuccess);
}

TEST_F(FakeNcclTest, TheFirstCollectiveIsInProgressUntilAllRanksHaveCalledIt) {
  const UniqueId id = Id();
  std::vector<CommHandle> comms;
  for (int rank = 0; rank < 2; ++rank) comms.push_back(Begin(id, 2, rank, rank));
  for (CommHandle comm : comms) ASSERT_EQ(Await(comm), Result::kSuccess);
  const std::vector<cuda::StreamHandle> streams = {gpus_.MakeStream(0), gpus_.MakeStream(1)};
  EXPECT_EQ(Sum(comms[0], streams[0]), Result::kInProgress);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Ask(comms[0]), Result::kInProgress);
  EXPECT_EQ(Sum(comms[1], streams[1]), Result::kSuccess);
  EXPECT_EQ(Ask(comms[0]), Result::kSuccess);
  EXPECT_EQ(Sum(comms[0], streams[0]), Result::kSuccess);  // they are connected
}

TEST_F(FakeNcclTest, TheFirstMessageIsInProgressUntilBothRanksHaveCalled) {
  const UniqueId id = Id();
  std::vector<CommHandle> comms;
  for (int rank = 0; rank < 2; ++rank) comms.push_back(Begin(id, 2, rank, rank));
  for (CommHandle comm : comms) ASSERT_EQ(Await(comm), Result::kSuccess);
  const std::vector<cuda::StreamHandle> streams = {gpus_.MakeStream(0), gpus_.MakeStream(1)};
  float got = 0;
  EXPECT_EQ(api_.Send(&value_, 1, DataType::kFloat32, 1, comms[0], streams[0]),
            Result::kInProgress);
  EXPECT_EQ(Ask(comms[0]), Result::kInProgress);
  EXPECT_EQ(api_.Recv(&got, 1, DataType::kFloat32, 0, comms[1], streams[1]), Result::kSuccess);
  EXPECT_EQ(Ask(comms[0]), Result::kSuccess);
  gpus_.RunDevices();
  EXPECT_EQ(got, 1);
}

// Two ranks of a communicator that have had a message from the first to the second.
struct Connected {
  std::vector<CommHandle> comms;
  std::vector<cuda::StreamHandle> streams;
};
Connected Connect(FakeGpus& gpus, const std::vector<CommHandle>& comms) {
  Connected made{comms, {gpus.MakeStream(0), gpus.MakeStream(1)}};
  static float value = 0;
  static float got = 0;
  const Api& api = gpus.nccl();
  EXPECT_EQ(api.Send(&value, 1, DataType::kFloat32, 1, comms[0], made.streams[0]),
            Result::kInProgress);
  EXPECT_EQ(api.Recv(&got, 1, DataType::kFloat32, 0, comms[1], made.streams[1]), Result::kSuccess);
  Result result = Result::kInProgress;
  EXPECT_EQ(api.CommGetAsyncError(comms[0], &result), Result::kSuccess);
  gpus.RunDevices();
  return made;
}

TEST_F(FakeNcclTest, ASendStandsInItsStreamUntilItsReceiveIsThere) {
  const UniqueId id = Id();
  std::vector<CommHandle> comms;
  for (int rank = 0; rank < 2; ++rank) comms.push_back(Begin(id, 2, rank, rank));
  for (CommHandle comm : comms) ASSERT_EQ(Await(comm), Result::kSuccess);
  const auto [both, streams] = Connect(gpus_, comms);
  float got = 0;
  char behind = 0;
  EXPECT_EQ(api_.Send(&value_, 1, DataType::kFloat32, 1, both[0], streams[0]), Result::kSuccess);
  gpus_.PutWrite(streams[0], &behind, 1, 1);
  gpus_.RunDevices();
  EXPECT_EQ(behind, 0);
  EXPECT_EQ(api_.Recv(&got, 1, DataType::kFloat32, 0, both[1], streams[1]), Result::kSuccess);
  gpus_.RunDevices();
  EXPECT_EQ(got, 1);
  EXPECT_EQ(behind, 1);
}

TEST_F(FakeNcclDeathTest, MessagesThatAreCalledInAnotherOrderDoNotFit) {
  const UniqueId id = Id();
  std::vector<CommHandle> comms;
  for (int rank = 0; rank < 2; ++rank) comms.push_back(Begin(id, 2, rank, rank));
  for (CommHandle comm : comms) ASSERT_EQ(Await(comm), Result::kSuccess);
  const auto [both, streams] = Connect(gpus_, comms);
  float got[2] = {};
  EXPECT_EQ(api_.Send(&value_, 1, DataType::kFloat32, 1, both[0], streams[0]), Result::kSuccess);
  EXPECT_EQ(api_.Recv(got, 2, DataType::kFloat32, 0, both[1], streams[1]), Result::kSuccess);
  EXPECT_DEATH(gpus_.RunDevices(), "ncclRecv of another size than its ncclSend");
}

TEST_F(FakeNcclTest, TheGoodByeIsInProgressUntilTheStreamsAreThrough) {
  CommHandle comm = Alone();
  cuda::StreamHandle stream = gpus_.MakeStream();
  std::atomic<bool> open{false};
  gpus_.PutGate(stream, open);
  ASSERT_EQ(Sum(comm, stream), Result::kSuccess);
  EXPECT_EQ(api_.CommFinalize(comm), Result::kInProgress);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Ask(comm), Result::kInProgress);
  open = true;
  EXPECT_EQ(Ask(comm), Result::kSuccess);
  EXPECT_EQ(Sum(comm, stream), Result::kInvalidArgument);
  EXPECT_EQ(api_.CommDestroy(comm), Result::kSuccess);
  EXPECT_EQ(gpus_.live_communicators(), 0);
}

TEST_F(FakeNcclDeathTest, ACommunicatorIsDestroyedOnlyAfterItsGoodBye) {
  CommHandle comm = Alone();
  EXPECT_DEATH(api_.CommDestroy(comm), "ncclCommDestroy without ncclCommFinalize");
  ASSERT_EQ(api_.CommFinalize(comm), Result::kInProgress);
  EXPECT_DEATH(api_.CommDestroy(comm), "ncclCommDestroy before ncclCommFinalize is over");
}

TEST_F(FakeNcclDeathTest, MemoryThatIsRegisteredIsNotFreed) {
  CommHandle comm = Alone();
  void* memory = nullptr;
  void* handle = nullptr;
  ASSERT_EQ(api_.MemAlloc(&memory, 4096), Result::kSuccess);
  ASSERT_EQ(api_.CommRegister(comm, memory, 4096, &handle), Result::kSuccess);
  EXPECT_DEATH(api_.MemFree(memory), "ncclMemFree of memory that is registered");
  ASSERT_EQ(api_.CommDeregister(comm, handle), Result::kSuccess);
  EXPECT_DEATH(gpus_.cuda().Free(memory), "cudaFree of memory that is not its own");
  EXPECT_EQ(api_.MemFree(memory), Result::kSuccess);
}

TEST_F(FakeNcclDeathTest, MemoryThatACollectiveUsesIsNotFreed) {
  CommHandle comm = Alone();
  void* memory = nullptr;
  ASSERT_EQ(api_.MemAlloc(&memory, 4096), Result::kSuccess);
  gpus_.Hold();
  ASSERT_EQ(api_.Broadcast(memory, memory, 4096, DataType::kUint8, 0, comm, gpus_.MakeStream()),
            Result::kSuccess);
  EXPECT_DEATH(api_.MemFree(memory), "ncclMemFree of memory that work in stream");
}

// The abort frees, and waits for what others have on the device.
TEST_F(FakeNcclTest, AnAbortWaitsForItsDevice) {
  CommHandle comm = Alone();
  std::atomic<bool> open{false};
  gpus_.PutGate(gpus_.MakeStream(0), open);
  std::thread aborting([&] { EXPECT_EQ(api_.CommAbort(comm), Result::kSuccess); });
  while (gpus_.aborting() == 0) std::this_thread::yield();
  gpus_.RunDevices();
  EXPECT_EQ(gpus_.aborting(), 1);
  open = true;
  aborting.join();
  EXPECT_EQ(gpus_.aborting(), 0);
}

// A launch that is in progress comes to its end, and its kernel into the stream.
TEST_F(FakeNcclTest, AnAbortEndsWhatIsBeingLaunched) {
  CommHandle comm = Alone();
  cuda::StreamHandle stream = gpus_.MakeStream();
  gpus_.AnswerInProgress(-1);
  ASSERT_EQ(Sum(comm, stream), Result::kInProgress);
  value_ = 5;
  EXPECT_EQ(api_.CommAbort(comm), Result::kSuccess);
  char behind = 0;
  gpus_.PutWrite(stream, &behind, 1, 1);  // nobody launches there any more
  gpus_.RunDevices();
  EXPECT_EQ(behind, 1);
}

TEST_F(FakeNcclTest, ACommunicatorIsOfTheDeviceThatWasItsThreads) {
  CommHandle comm = Begin(Id(), 1, 0, /*device=*/2);
  gpus_.cuda().SetDevice(0);
  ASSERT_EQ(Await(comm), Result::kSuccess);
  EXPECT_EQ(Sum(comm, gpus_.MakeStream(0)), Result::kUnhandledCudaError);
  EXPECT_EQ(Sum(comm, gpus_.MakeStream(2)), Result::kSuccess);
}

TEST_F(FakeNcclTest, TwoRanksOfAHostWithOneDeviceAreFoundWhenAllHaveCome) {
  const UniqueId id = Id();
  CommHandle first = Begin(id, 2, 0);
  EXPECT_EQ(Ask(first), Result::kInProgress);
  CommHandle second = Begin(id, 2, 1);
  EXPECT_EQ(Await(first), Result::kInvalidUsage);
  EXPECT_EQ(Await(second), Result::kInvalidUsage);
  EXPECT_EQ(Sum(second, gpus_.MakeStream()), Result::kInvalidUsage);
  gpus_.SetHosts(2);
  const UniqueId far = Id();
  first = Begin(far, 2, 0);
  second = Begin(far, 2, 1);
  EXPECT_EQ(Await(first), Result::kSuccess);
  EXPECT_EQ(Await(second), Result::kSuccess);
}

// Each rank's memory, registered as a window of both.
class FakeWindowTest : public FakeNcclTest {
 protected:
  void SetUp() override {
    const UniqueId id = Id();
    for (int rank = 0; rank < 2; ++rank) comms_[rank] = Begin(id, 2, rank, rank);
    for (CommHandle comm : comms_) ASSERT_EQ(Await(comm), Result::kSuccess);
    for (void*& memory : memories_) ASSERT_EQ(api_.MemAlloc(&memory, 4096), Result::kSuccess);
  }
  Result Register(int rank) {
    return api_.CommWindowRegister(comms_[rank], memories_[rank], 4096, &windows_[rank],
                                   kWindowCollSymmetric);
  }

  CommHandle comms_[2] = {};
  void* memories_[2] = {};
  void* windows_[2] = {};
};

TEST_F(FakeWindowTest, IsThereWhenAllRanksHaveCome) {
  EXPECT_EQ(Register(0), Result::kSuccess);
  EXPECT_EQ(Ask(comms_[0]), Result::kInProgress);
  EXPECT_EQ(Register(1), Result::kSuccess);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(windows_[rank], nullptr);
    EXPECT_EQ(Ask(comms_[rank]), Result::kSuccess);
    EXPECT_NE(windows_[rank], nullptr);
  }
}

TEST_F(FakeWindowTest, WhereThereIsNoneAHandleComesOrNothing) {
  for (const auto mode : {FakeGpus::Windows::kLocal, FakeGpus::Windows::kNone}) {
    gpus_.SetWindows(mode);
    windows_[0] = this;
    for (const int rank : {0, 1}) Register(rank);
    for (CommHandle comm : comms_) EXPECT_EQ(Ask(comm), Result::kSuccess);
    EXPECT_EQ(windows_[0] == this, mode == FakeGpus::Windows::kNone);
  }
}

TEST_F(FakeWindowTest, AFailureIsOfTheCommunicatorAndIsToldByAsking) {
  gpus_.FailNext("ncclCommWindowRegister", static_cast<int>(Result::kUnhandledCudaError));
  EXPECT_EQ(Register(0), Result::kSuccess);
  EXPECT_EQ(Ask(comms_[0]), Result::kUnhandledCudaError);
  EXPECT_EQ(Register(0), Result::kUnhandledCudaError);  // it is of no more use
  EXPECT_EQ(Register(1), Result::kSuccess);
  EXPECT_EQ(Ask(comms_[1]), Result::kInProgress);
}

TEST_F(FakeWindowTest, NeedsMemoryOfNccls) {
  ASSERT_EQ(gpus_.cuda().Malloc(&memories_[0], 4096), cuda::Error::kSuccess);
  EXPECT_EQ(Register(0), Result::kSuccess);
  EXPECT_EQ(Ask(comms_[0]), Result::kUnhandledCudaError);
}

TEST_F(FakeNcclDeathTest, ACommunicatorHasOneCallerAtATime) {
  CommHandle comm = Alone();
  std::atomic<bool> open{false};
  gpus_.PutGate(gpus_.MakeStream(0), open);
  std::thread aborting([&] { api_.CommAbort(comm); });
  while (gpus_.aborting() == 0) std::this_thread::yield();
  EXPECT_DEATH(Ask(comm), "two threads are in calls of NCCL with one communicator");
  open = true;
  aborting.join();
  EXPECT_DEATH(Ask(comm), "a communicator that is no more");
}

TEST_F(FakeNcclDeathTest, AUniqueIdMakesOneCommunicator) {
  const UniqueId id = Id();
  Begin(id, 2, 0, 0);
  EXPECT_DEATH(Begin(id, 2, 0, 1), "a unique id makes one communicator, and rank 0");
  Begin(id, 2, 1, 1);
  EXPECT_DEATH(Begin(id, 2, 1, 1), "a unique id makes one communicator, and rank 1");
}

TEST_F(FakeNcclTest, InputsAndOutputsAreApartOrExactlyInPlace) {
  const UniqueId id = Id();
  std::vector<CommHandle> comms;
  for (int rank = 0; rank < 2; ++rank) comms.push_back(Begin(id, 2, rank, rank));
  for (CommHandle comm : comms) ASSERT_EQ(Await(comm), Result::kSuccess);
  char memory[16] = {};
  cuda::StreamHandle stream = gpus_.MakeStream(1);
  gpus_.FailNext("ncclAllReduce", 3);  // what gets so far is not refused
  gpus_.FailNext("ncclAllGather", 3);
  gpus_.FailNext("ncclReduceScatter", 3);
  gpus_.FailNext("ncclBroadcast", 3);
  const auto type = DataType::kUint8;
  const auto sum = RedOp::kSum;
  constexpr auto kRefused = Result::kInvalidUsage;
  constexpr auto kTaken = Result::kInternalError;
  CommHandle comm = comms[1];
  EXPECT_EQ(api_.AllReduce(memory, memory + 1, 4, type, sum, comm, stream), kRefused);
  EXPECT_EQ(api_.AllReduce(memory, memory, 4, type, sum, comm, stream), kTaken);
  EXPECT_EQ(api_.AllGather(memory, memory, 4, type, comm, stream), kRefused);
  EXPECT_EQ(api_.AllGather(memory + 4, memory, 4, type, comm, stream), kTaken);
  EXPECT_EQ(api_.ReduceScatter(memory, memory, 4, type, sum, comm, stream), kRefused);
  EXPECT_EQ(api_.ReduceScatter(memory, memory + 4, 4, type, sum, comm, stream), kTaken);
  // A rank that is not the root does not read.
  EXPECT_EQ(api_.Broadcast(memory, memory + 1, 4, type, 1, comm, stream), kRefused);
  EXPECT_EQ(api_.Broadcast(memory, memory + 1, 4, type, 0, comm, stream), kTaken);
}

}  // namespace
}  // namespace sirtaki::ops::nccl
