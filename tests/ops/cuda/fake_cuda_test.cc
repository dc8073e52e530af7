// What the CUDA of FakeGpus refuses: the rules of the real one that a program would break unseen.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <set>
#include <thread>

#include "ops/cuda/cuda_api.h"
#include "tests/support/fake_gpus.h"

namespace sirtaki::ops::cuda {
namespace {

using tests::FakeGpus;

class FakeCudaTest : public ::testing::Test {
 protected:
  void* Take(std::size_t bytes) {
    void* memory = nullptr;
    EXPECT_EQ(cuda_.Malloc(&memory, bytes), Error::kSuccess);
    return memory;
  }
  void* TakePinned(std::size_t bytes) {
    void* memory = nullptr;
    EXPECT_EQ(cuda_.HostAlloc(&memory, bytes, 0), Error::kSuccess);
    return memory;
  }

  FakeGpus gpus_;
  const Api& cuda_ = gpus_.cuda();
};
using FakeCudaDeathTest = FakeCudaTest;

TEST_F(FakeCudaDeathTest, MemoryThatWorkUsesIsNotFreed) {
  void* const memory = Take(100);
  void* const other = Take(100);
  gpus_.Hold();
  StreamHandle stream = gpus_.MakeStream();
  ASSERT_EQ(cuda_.MemsetAsync(static_cast<char*>(memory) + 10, 1, 5, stream), Error::kSuccess);
  EXPECT_DEATH(cuda_.Free(memory), "cudaFree of memory that work in stream .* uses");
  EXPECT_EQ(cuda_.Free(other), Error::kSuccess);  // waits for the stream
  EXPECT_EQ(cuda_.Free(memory), Error::kSuccess);
}

TEST_F(FakeCudaDeathTest, FreeingAndTakingPinnedMemoryWaitsForTheDevice) {
  void* const memory = Take(100);
  void* const pinned = TakePinned(100);
  std::atomic<bool> open{false};
  gpus_.PutGate(gpus_.MakeStream(0), open);
  gpus_.LimitWaits(std::chrono::milliseconds(5));
  void* more = nullptr;
  EXPECT_DEATH(cuda_.HostAlloc(&more, 100, 0), "cudaHostAlloc would deadlock: it waits for device");
  EXPECT_DEATH(cuda_.Free(memory), "cudaFree would deadlock");
  EXPECT_DEATH(cuda_.FreeHost(pinned), "cudaFreeHost would deadlock");
  gpus_.LimitWaits(std::chrono::seconds(30));
  std::thread opening([&] { open = true; });
  EXPECT_EQ(cuda_.FreeHost(pinned), Error::kSuccess);
  opening.join();
  EXPECT_EQ(cuda_.Free(memory), Error::kSuccess);
}

TEST_F(FakeCudaTest, AnEventIsRecordedOnItsDeviceAlone) {
  EventHandle event = nullptr;
  cuda_.SetDevice(1);
  ASSERT_EQ(cuda_.EventCreateWithFlags(&event, 0), Error::kSuccess);
  EXPECT_EQ(static_cast<int>(cuda_.EventRecord(event, gpus_.MakeStream(2))), 400);
  EXPECT_EQ(static_cast<int>(cuda_.GetLastError()), 400);
  EXPECT_EQ(cuda_.EventRecord(event, gpus_.MakeStream(1)), Error::kSuccess);
  cuda_.SetDevice(2);  // whose default stream it is
  EXPECT_EQ(static_cast<int>(cuda_.EventRecord(event, nullptr)), 400);
  EXPECT_EQ(static_cast<int>(cuda_.GetLastError()), 400);
  EXPECT_EQ(cuda_.StreamWaitEvent(nullptr, event, 0), Error::kSuccess);  // from any device
}

TEST_F(FakeCudaDeathTest, AStreamThatHasWorkIsNotDestroyed) {
  StreamHandle stream = nullptr;
  ASSERT_EQ(cuda_.StreamCreateWithPriority(&stream, 0, 0), Error::kSuccess);
  std::atomic<bool> open{false};
  gpus_.PutGate(stream, open);
  EXPECT_DEATH(cuda_.StreamDestroy(stream), "cudaStreamDestroy of a stream with work");
  open = true;
  EXPECT_EQ(cuda_.StreamDestroy(stream), Error::kSuccess);
}

TEST_F(FakeCudaDeathTest, AnErrorStaysWithItsThreadUntilItIsAskedFor) {
  EventHandle event = nullptr;
  ASSERT_EQ(cuda_.EventCreateWithFlags(&event, 0), Error::kSuccess);
  StreamHandle stream = gpus_.MakeStream();
  gpus_.Hold();
  ASSERT_EQ(cuda_.EventRecord(event, stream), Error::kSuccess);
  char byte = 0;
  const auto query = [&] { EXPECT_EQ(cuda_.EventQuery(event), Error::kNotReady); };
  EXPECT_DEATH(
      {
        query();
        gpus_.PutWrite(stream, &byte, 1, 1);
      },
      "a program's work finds error 600");
  EXPECT_DEATH(std::thread(query).join(), "the end of a thread finds error 600");
  query();
  EXPECT_EQ(cuda_.StreamWaitEvent(stream, event, 0), Error::kSuccess);  // which forgets nothing
  EXPECT_EQ(cuda_.GetLastError(), Error::kNotReady);
  EXPECT_EQ(cuda_.GetLastError(), Error::kSuccess);
  gpus_.PutWrite(stream, &byte, 1, 1);
}

TEST_F(FakeCudaDeathTest, OurThreadsCopyFromAndToPinnedMemoryAlone) {
  char plain = 3;
  void* const pinned = TakePinned(10);
  void* const memory = Take(10);
  StreamHandle stream = gpus_.MakeStream(0);
  const auto copy_both_ways = [&](void* of_host) {
    EXPECT_EQ(cuda_.MemcpyAsync(memory, of_host, 1, CopyKind::kHostToDevice, stream),
              Error::kSuccess);
    EXPECT_EQ(cuda_.MemcpyAsync(of_host, memory, 1, CopyKind::kDeviceToHost, stream),
              Error::kSuccess);
  };
  // A thread of the program's waits.
  ASSERT_EQ(cuda_.MemcpyAsync(memory, &plain, 1, CopyKind::kHostToDevice, stream), Error::kSuccess);
  EXPECT_EQ(*static_cast<char*>(memory), 3);
  int mode = kCaptureModeThreadLocal;
  ASSERT_EQ(cuda_.ThreadExchangeStreamCaptureMode(&mode), Error::kSuccess);
  EXPECT_DEATH(copy_both_ways(&plain), "memory of the host that is not pinned");
  copy_both_ways(pinned);
}

// Two streams write the same byte, the second also behind a place of the first one.
TEST(FakeGpusTest, ASeedDecidesWhichStreamGoesFirstAndKeepsWhatWaits) {
  const auto run = [](std::uint64_t seed) {
    FakeGpus gpus;
    const Api& cuda = gpus.cuda();
    char byte = 0;
    char behind = 0;
    EventHandle event = nullptr;
    StreamHandle streams[2] = {gpus.MakeStream(0), gpus.MakeStream(0)};
    EXPECT_EQ(cuda.EventCreateWithFlags(&event, 0), Error::kSuccess);
    gpus.Hold();
    gpus.SetSeed(seed);
    gpus.PutWrite(streams[0], &byte, 1, 1);
    gpus.PutWrite(streams[1], &byte, 2, 1);
    gpus.PutWrite(streams[0], &behind, 1, 1);
    EXPECT_EQ(cuda.EventRecord(event, streams[0]), Error::kSuccess);
    EXPECT_EQ(cuda.StreamWaitEvent(streams[1], event, 0), Error::kSuccess);
    gpus.PutWrite(streams[1], &behind, 2, 1);
    gpus.Release();
    for (StreamHandle stream : streams) gpus.AwaitStream(stream);
    EXPECT_EQ(behind, 2);
    return static_cast<int>(byte);
  };
  std::set<int> seen;
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    const int last = run(seed);
    EXPECT_EQ(run(seed), last) << seed;
    seen.insert(last);
  }
  EXPECT_THAT(seen, ::testing::ElementsAre(1, 2));
}

}  // namespace
}  // namespace sirtaki::ops::cuda
