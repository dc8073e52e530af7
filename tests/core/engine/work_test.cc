#include "core/engine/work.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "core/base/thread_annotations.h"
#include "tests/support/calling_watcher.h"

namespace sirtaki::core {
namespace {

TEST(HandleStateTest, TheFirstCompletionWins) {
  HandleState handle;
  EXPECT_FALSE(handle.done());
  EXPECT_TRUE(handle.Complete(Status(StatusCode::kPeerLost, "first")));
  EXPECT_FALSE(handle.Complete(Status::Ok()));
  EXPECT_TRUE(handle.done());
  EXPECT_EQ(handle.status().message(), "first");
}

TEST(HandleStateTest, WhatComesThenIsCalledOnceWhenTheHandleIsComplete) {
  HandleState handle;
  int early = 0;
  int late = 0;
  handle.Then([&] {
    EXPECT_TRUE(handle.done());
    ++early;
  });
  handle.Then([&] { ++early; });
  EXPECT_EQ(early, 0);
  handle.Complete(Status::Ok());
  handle.Complete(Status::Ok());
  EXPECT_EQ(early, 2);
  handle.Then([&] { ++late; });
  EXPECT_EQ(late, 1);
}

TEST(HandleStateTest, CompletionRingsOnlyIfSomebodyWaits) {
  int rings = 0;
  HandleState alone(tests::WhenCompleted([&] { ++rings; }));
  alone.Complete(Status::Ok());
  EXPECT_EQ(rings, 0);

  HandleState awaited(tests::WhenCompleted([&] { ++rings; }));
  awaited.BeginWait();
  awaited.Complete(Status::Ok());
  awaited.Complete(Status::Ok());
  EXPECT_EQ(rings, 1);
  awaited.EndWait();

  HandleState left(tests::WhenCompleted([&] { ++rings; }));
  left.BeginWait();
  left.EndWait();
  left.Complete(Status::Ok());
  EXPECT_EQ(rings, 1);
}

TEST(HandleStateTest, TheRingComesAfterTheStateIsVisible) {
  HandleState* seen = nullptr;
  bool done_at_ring = false;
  HandleState handle(tests::WhenCompleted([&] { done_at_ring = seen->done(); }));
  seen = &handle;
  handle.BeginWait();
  handle.Complete(Status::Ok());
  EXPECT_TRUE(done_at_ring);
}

TEST(HandleStateTest, IsObservedOnce) {
  int observed = 0;
  {
    HandleState handle(tests::WhenObserved([&] { ++observed; }));
    handle.Complete(Status::Ok());
    EXPECT_EQ(observed, 0);
    handle.Observe();
    handle.Observe();
    EXPECT_EQ(observed, 1);
  }
  EXPECT_EQ(observed, 1);
}

TEST(HandleStateTest, DroppingItObservesIt) {
  int observed = 0;
  {
    HandleState handle(tests::WhenObserved([&] { ++observed; }));
  }
  EXPECT_EQ(observed, 1);
}

TEST(HandleStateTest, AbsenceIsToldWithTheEnd) {
  HandleState handle;
  EXPECT_FALSE(handle.PartIsAbsent(0));
  handle.SetAbsentParts({true});
  handle.Complete(Status::Ok());
  EXPECT_TRUE(handle.PartIsAbsent(0));
}

TEST(HandleStateTest, OfManyCompletersOneWins) {
  for (int round = 0; round < 200; ++round) {
    HandleState handle;
    std::atomic<int> winners{0};
    std::atomic<int> winner{-1};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] {
        if (handle.Complete(Status(StatusCode::kAborted, std::to_string(i)))) {
          ++winners;
          winner = i;
        }
        EXPECT_TRUE(handle.done());
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(winners, 1);
    EXPECT_EQ(handle.status().message(), std::to_string(winner));
  }
}

// Either the completer sees the waiter and rings, or the waiter sees that it is done and does not
// sleep.
TEST(HandleStateTest, NoWaiterIsMissed) {
  Mutex mutex;
  CondVar bell;
  int rings = 0;
  for (int round = 0; round < 5000; ++round) {
    {
      MutexLock lock(mutex);
      rings = 0;
    }
    auto handle = std::make_shared<HandleState>(tests::WhenCompleted([&] {
      MutexLock lock(mutex);
      ++rings;
      bell.NotifyAll();
    }));
    std::thread completer([handle] { handle->Complete(Status::Ok()); });
    handle->BeginWait();
    if (!handle->done()) {
      const TimePoint deadline = Clock::now() + std::chrono::seconds(20);
      MutexLock lock(mutex);
      while (rings == 0)
        ASSERT_TRUE(bell.WaitUntil(mutex, deadline)) << "missed in round " << round;
    }
    EXPECT_TRUE(handle->done());
    EXPECT_TRUE(handle->status().ok());
    handle->EndWait();
    completer.join();
  }
}

TEST(HandleStateTest, WorkInPiecesIsCompleteWithTheLast) {
  HandleState handle;
  handle.AddPiece();
  handle.EndPiece(Status::Ok());
  EXPECT_FALSE(handle.done());
  handle.EndPiece(Status::Ok());
  ASSERT_TRUE(handle.done());
  EXPECT_TRUE(handle.status().ok());
}

TEST(HandleStateTest, OneOfItsPiecesFailsTheWork) {
  HandleState handle;
  handle.AddPiece();
  handle.EndPiece({StatusCode::kBackend, "broken"});
  ASSERT_TRUE(handle.done());
  handle.EndPiece(Status::Ok());
  EXPECT_EQ(handle.status().message(), "broken");
}

TEST(HandleStateTest, PartsThatNobodyHadAreToldWhereTheWorkIsDone) {
  HandleState handle;
  handle.SetAbsentParts({false, true});
  handle.Complete(Status::Ok());
  EXPECT_FALSE(handle.PartIsAbsent(0));
  EXPECT_TRUE(handle.PartIsAbsent(1));
  EXPECT_FALSE(handle.PartIsAbsent(2));
}

}  // namespace
}  // namespace sirtaki::core
