#include "core/threads/gate.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

namespace sirtaki::core {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TimePoint Later() { return Clock::now() + seconds(60); }

void OnAnotherThread(const std::function<void()>& call) { std::thread(call).join(); }

// A counter that nothing else protects.
TEST(GateTest, OneThreadAtATimeIsInside) {
  constexpr int kRounds = 20000;
  Gate gate;
  int count = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        // A wake-up that is lost is found by the test's own time limit.
        if (!gate.TryLock("try") && !gate.LockUntil("wait", TimePoint::max())) return;
        ++count;
        gate.Unlock();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(count, 4 * kRounds);
}

TEST(GateTest, ItsHolderIsKnownByThreadAndByName) {
  Gate gate;
  EXPECT_FALSE(gate.IsHeldByThisThread());
  EXPECT_EQ(gate.Holder(), "");
  ASSERT_TRUE(gate.TryLock("MPI_Test"));
  EXPECT_TRUE(gate.IsHeldByThisThread());
  OnAnotherThread([&] {
    EXPECT_FALSE(gate.IsHeldByThisThread());
    EXPECT_EQ(gate.Holder(), "MPI_Test");
  });
  gate.Unlock();
  EXPECT_FALSE(gate.IsHeldByThisThread());
  EXPECT_EQ(gate.Holder(), "");
}

TEST(GateTest, AWaitEndsAtItsDeadlineAndTheGateIsStillItsHolders) {
  Gate gate;
  ASSERT_TRUE(gate.TryLock("first"));
  OnAnotherThread([&] {
    EXPECT_FALSE(gate.TryLock("second"));
    const TimePoint deadline = Clock::now() + milliseconds(20);
    EXPECT_FALSE(gate.LockUntil("second", deadline));
    EXPECT_GE(Clock::now(), deadline);
    EXPECT_FALSE(gate.IsHeldByThisThread());
    EXPECT_EQ(gate.Holder(), "first");
  });
  gate.Unlock();
  OnAnotherThread([&] {
    ASSERT_TRUE(gate.LockUntil("second", Later()));
    EXPECT_EQ(gate.Holder(), "second");
    gate.Unlock();
  });
}

TEST(GateTest, ALockThatComesTooLateSaysWhoWasThere) {
  Gate gate;
  {
    const GateLock first(gate, "first", Later());
    ASSERT_TRUE(first.is_held());
    OnAnotherThread([&] {
      const GateLock second(gate, "second", Clock::now() + milliseconds(10));
      EXPECT_FALSE(second.is_held());
      EXPECT_EQ(second.status().code(), StatusCode::kTimedOut);
      EXPECT_EQ(second.status().message(),
                "second came to its deadline while another thread was in first");
    });
    EXPECT_TRUE(gate.IsHeldByThisThread());
  }
  EXPECT_EQ(gate.Holder(), "");
}

}  // namespace
}  // namespace sirtaki::core
