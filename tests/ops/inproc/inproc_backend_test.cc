#include "ops/inproc/inproc_backend.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "ops/groups/exchange_slices.h"
#include "tests/support/backend_conformance.h"
#include "tests/support/rank_threads.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::Status;
using core::StatusCode;
using tests::RankThreads;

constexpr Channel kSmall{core::kWorldSet, fusion::Lane::kSmall};
constexpr Channel kLarge{core::kWorldSet, fusion::Lane::kLarge};

class InprocConformanceTest : public ::testing::TestWithParam<int> {};

TEST_P(InprocConformanceTest, Conforms) {
  const int size = GetParam();
  InprocWorld world(size);
  RankThreads::Run(size, [&](int rank) {
    const std::unique_ptr<Backend> backend = world.Connect(rank);
    tests::BackendConformance conformance(*backend, rank, size);
    for (const tests::BackendCheck& check : tests::kBackendChecks) {
      SCOPED_TRACE(check.name);
      RankThreads::Note(check.name);
      (conformance.*check.run)();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, InprocConformanceTest, ::testing::Values(1, 2, 3, 4));

// What the members give and take does not fit together: the one that takes too much says so.
TEST(InprocBackendTest, PartsOfDifferentSizesAreAnError) {
  InprocWorld world(2);
  const std::unique_ptr<Backend> zero = world.Connect(0);
  const std::unique_ptr<Backend> one = world.Connect(1);
  const float given[2] = {};
  float taken[2] = {};
  Slices larger;
  larger.GiveParts(given, taken, 4, 0, 2);
  Slices smaller;
  smaller.GiveParts(given, taken, 2, 1, 2);
  const auto first = larger.Exchange(*zero, kSmall);
  const auto second = smaller.Exchange(*one, kSmall);
  ASSERT_TRUE(first->Poll());
  EXPECT_EQ(first->status().code(), StatusCode::kBackend);
  EXPECT_NE(first->status().message().find("rank 1 sent 2 bytes"), std::string::npos)
      << first->status().ToString();
  EXPECT_EQ(taken[0], 0);
}

TEST(InprocBackendTest, RefusesWhatIsImpossibleAtOnce) {
  InprocWorld world(2);
  const std::unique_ptr<Backend> backend = world.Connect(0);
  int value = 0;
  const auto code = [](const std::unique_ptr<Completion>& operation) {
    EXPECT_TRUE(operation->Poll());
    return operation->status().code();
  };
  EXPECT_EQ(code(backend->AllReduce(kLarge, &value, 1, DType::kBool, core::ReduceOp::kSum, {})),
            StatusCode::kUnsupported);
  const auto beyond = backend->SendMessage(2, 0, &value, 4);
  EXPECT_EQ(code(beyond), StatusCode::kInvalidArgument);
  EXPECT_EQ(beyond->status().message(), "rank 0 of 2 cannot send 4 bytes: rank 2, tag 0");
  EXPECT_EQ(code(backend->SendMessage(1, -1, &value, 4)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(backend->ReceiveMessage(1, Backend::kAnswerTag + 1, &value, 4)),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code(backend->ReceiveMessage(1, 0, &value, -1)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(backend->AllGather({5, fusion::Lane::kLarge}, &value, &value, 1)),
            StatusCode::kBackend);
}

// A member that is ahead removes the set for itself alone.
TEST(InprocBackendTest, AMemberThatHasRemovedASetLeavesItToTheOthers) {
  InprocWorld world(2);
  const std::unique_ptr<Backend> zero = world.Connect(0);
  const std::unique_ptr<Backend> one = world.Connect(1);
  constexpr Channel kPair{1, fusion::Lane::kSmall};
  EXPECT_TRUE(zero->AddSet(1, {0, 1}).ok());
  EXPECT_TRUE(one->AddSet(1, {0, 1}).ok());
  float values[2] = {1, 2};
  const auto sum = zero->AllReduce(kPair, values, 1, DType::kF32, core::ReduceOp::kSum, {});
  const auto gone = one->AllReduce(kPair, values + 1, 1, DType::kF32, core::ReduceOp::kSum, {});
  EXPECT_TRUE(gone->Poll());
  EXPECT_TRUE(one->RemoveSet(1).ok());
  EXPECT_EQ(
      one->AllReduce(kPair, values, 1, DType::kF32, core::ReduceOp::kSum, {})->status().code(),
      StatusCode::kBackend);
  EXPECT_FALSE(zero->AllReduce(kPair, values, 1, DType::kF32, core::ReduceOp::kSum, {})->Poll());
  EXPECT_TRUE(zero->RemoveSet(1).ok());
  EXPECT_TRUE(zero->RemoveSet(1).ok());  // as for a set of others
}

TEST(InprocBackendTest, AMessageTooLongIsAnErrorOfTheReceive) {
  InprocWorld world(2);
  const std::unique_ptr<Backend> zero = world.Connect(0);
  const std::unique_ptr<Backend> one = world.Connect(1);
  const char given[4] = {1, 2, 3, 4};
  char taken[4] = {};
  const auto receive = one->ReceiveMessage(0, 3, taken, 3);
  const auto send = zero->SendMessage(1, 3, given, 4);
  ASSERT_TRUE(receive->Poll());
  EXPECT_NE(receive->status().message().find("rank 0 sent 4 bytes with tag 3"), std::string::npos)
      << receive->status().ToString();
  EXPECT_EQ(taken[0], 0);
  EXPECT_TRUE(send->Poll());
  EXPECT_TRUE(send->status().ok());
}

TEST(InprocBackendTest, ADroppedMessageWasNeverThere) {
  InprocWorld world(1);
  const std::unique_ptr<Backend> backend = world.Connect(0);
  const int given[2] = {1, 2};
  { const auto dropped = backend->SendMessage(0, 0, given, 4); }
  const auto send = backend->SendMessage(0, 0, given + 1, 4);
  EXPECT_FALSE(send->Poll());
  int taken = 0;
  const auto receive = backend->ReceiveMessage(0, 0, &taken, 4);
  EXPECT_TRUE(send->Poll());
  EXPECT_TRUE(receive->Poll());
  EXPECT_EQ(taken, 2);
}

TEST(InprocBackendTest, AbortEndsWhatBlocksAndWhatComes) {
  InprocWorld world(2);
  const Status why(StatusCode::kPeerLost, "rank 1 is gone");
  const std::unique_ptr<Backend> backend = world.Connect(0);
  std::atomic<bool> started{false};
  Status seen;
  float value = 1;
  std::thread blocked([&] {
    started = true;
    seen = backend->AllReduce(kLarge, &value, 1, DType::kF32, core::ReduceOp::kSum, {})->status();
  });
  const auto polled = backend->AllReduce(kSmall, &value, 1, DType::kF32, core::ReduceOp::kSum, {});
  EXPECT_FALSE(polled->Poll());
  const auto message = backend->ReceiveMessage(1, 0, &value, 4);
  EXPECT_FALSE(message->Poll());
  while (!started) std::this_thread::yield();
  backend->Abort(why);
  backend->Abort({StatusCode::kAborted, "later"});
  blocked.join();
  EXPECT_EQ(seen, why);
  EXPECT_TRUE(polled->Poll());
  EXPECT_EQ(polled->status(), why);
  EXPECT_TRUE(message->Poll());
  EXPECT_EQ(message->status(), why);
  const auto late = backend->SendMessage(1, 0, &value, 4);
  EXPECT_TRUE(late->Poll());
  EXPECT_EQ(late->status(), why);
  EXPECT_EQ(backend->AllReduce(kSmall, &value, 1, DType::kF32, core::ReduceOp::kSum, {})->status(),
            why);
  EXPECT_EQ(backend->AddSet(3, {0}), why);
}

TEST(InprocBackendTest, ABackendMayOutliveItsWorld) {
  std::unique_ptr<Backend> backend;
  {
    InprocWorld world(1);
    backend = world.Connect(0);
  }
  float value = 3;
  EXPECT_TRUE(
      backend->AllReduce(kSmall, &value, 1, DType::kF32, core::ReduceOp::kSum, {})->status().ok());
  EXPECT_EQ(value, 3);
}

}  // namespace
}  // namespace sirtaki::ops
