// A transport that does not come back: whoever has the engine's token keeps it.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/threads/stuck_watch.h"
#include "tests/core/engine/engine_world.h"

namespace sirtaki::core {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr auto kLimit = milliseconds(300);

TimePoint Soon() { return Clock::now() + seconds(60); }

// Holds whoever comes while it is shut.
class Gate {
 public:
  void Shut() { Set(true); }
  void Open() { Set(false); }
  void Pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!shut_) return;
    ++inside_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !shut_; });
    --inside_;
    changed_.notify_all();
  }
  bool AwaitInside(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_until(lock, Soon(), [&] { return inside_ == count; });
  }

 private:
  void Set(bool shut) {
    const std::lock_guard<std::mutex> lock(mutex_);
    shut_ = shut;
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool shut_ = false;
  int inside_ = 0;
};

// A world of two ranks, the first of which can be held in its transport. It stays for the life of
// the process, as it must when a thread was left behind.
struct HeldWorld {
  explicit HeldWorld(Duration limit) : world(2, 8, limit) {
    world[0].transport->before_receive = [this] { gate.Pass(); };
  }
  Gate gate;
  World world;
};

HeldWorld& MakeHeldWorld(Duration limit = kLimit) {
  static auto& kept = *new std::vector<std::unique_ptr<HeldWorld>>;
  kept.push_back(std::make_unique<HeldWorld>(limit));
  return *kept.back();
}

// The first rank, whose thread stands in its transport until the gate opens.
Rank& HoldThread(HeldWorld& held) {
  held.gate.Shut();
  held.world[0].engine->StartThread();
  EXPECT_TRUE(held.gate.AwaitInside(1));
  return held.world[0];
}

TEST(StuckWatchTest, OneCallThatLastsIsSeen) {
  StuckWatch watch(kLimit);
  TimePoint now{seconds(1)};
  EXPECT_FALSE(watch.Look(7, now));
  for (int i = 0; i < 29; ++i) EXPECT_FALSE(watch.Look(7, now += milliseconds(10)));
  EXPECT_TRUE(watch.Look(7, now += milliseconds(10)));
}

TEST(StuckWatchTest, ManyCallsAndNoneAreNot) {
  StuckWatch watch(kLimit);
  TimePoint now{seconds(1)};
  for (std::uint64_t i = 0; i < 100; ++i) {
    EXPECT_FALSE(watch.Look(2 * i + 1, now += milliseconds(100)));
  }
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(watch.Look(200, now += milliseconds(100)));
}

TEST(StuckWatchTest, AStoppedProcessIsNotStuck) {
  StuckWatch watch(kLimit);
  TimePoint now{seconds(1)};
  EXPECT_FALSE(watch.Look(7, now));
  EXPECT_FALSE(watch.Look(7, now += seconds(3600)));
}

TEST(EngineStuckTest, WhoWaitsWhileTheThreadIsStuckIsTold) {
  HeldWorld& held = MakeHeldWorld();
  Rank& rank = HoldThread(held);
  const WorkPtr work = held.world.Submit(0, "w");
  const Status status = rank.engine->Wait(*work->handle, Soon());
  EXPECT_EQ(status.code(), StatusCode::kBackend);
  EXPECT_NE(status.message().find("stuck in one call for 300 ms"), std::string::npos)
      << status.message();
  EXPECT_TRUE(rank.engine->stuck());
  EXPECT_EQ(rank.executor.abandoned.message(), status.message());
  // The end does not wait for it either.
  EXPECT_EQ(rank.engine->Leave("the test is over").code(), StatusCode::kBackend);
  rank.engine->StopThread();
  held.gate.Open();
  ASSERT_TRUE(held.gate.AwaitInside(0));
}

// After a fault, or a start that has failed, nobody waits for anything but the thread itself.
TEST(EngineStuckTest, WhoStopsAThreadThatIsStuckFindsIt) {
  HeldWorld& held = MakeHeldWorld();
  Rank& rank = HoldThread(held);
  rank.engine->StopThread();
  EXPECT_TRUE(rank.engine->stuck());
  EXPECT_EQ(rank.engine->fault().code(), StatusCode::kBackend);
  held.gate.Open();
  ASSERT_TRUE(held.gate.AwaitInside(0));
}

TEST(EngineStuckTest, WhoPausesWhileTheThreadIsStuckIsTold) {
  HeldWorld& held = MakeHeldWorld();
  Rank& rank = HoldThread(held);
  EXPECT_FALSE(rank.engine->Pause());
  EXPECT_TRUE(rank.engine->stuck());
  rank.engine->StopThread();
  held.gate.Open();
  ASSERT_TRUE(held.gate.AwaitInside(0));
}

TEST(EngineStuckTest, TheThreadNoticesADriverThatIsStuck) {
  HeldWorld& held = MakeHeldWorld();
  Rank& rank = held.world[0];
  held.gate.Shut();
  const WorkPtr first = held.world.Submit(0, "first");
  const WorkPtr second = held.world.Submit(0, "second");
  Status status;
  std::thread driver([&] { status = rank.engine->Wait(*first->handle, Soon()); });
  ASSERT_TRUE(held.gate.AwaitInside(1));
  rank.engine->StartThread();
  const TimePoint limit = Soon();
  while (!second->handle->done() && Clock::now() < limit) std::this_thread::yield();
  ASSERT_TRUE(second->handle->done());
  EXPECT_NE(second->handle->status().message().find("stuck"), std::string::npos);
  held.gate.Open();
  driver.join();
  EXPECT_EQ(status.code(), StatusCode::kBackend);
  rank.engine->StopThread();
}

TEST(EngineStuckTest, WhatComesBackInTimeIsNot) {
  HeldWorld& held = MakeHeldWorld(seconds(60));
  Rank& rank = HoldThread(held);
  const WorkPtr work = held.world.Submit(0, "w");
  EXPECT_EQ(rank.engine->Wait(*work->handle, Clock::now() + milliseconds(100)).code(),
            StatusCode::kTimedOut);
  held.gate.Open();
  const WorkPtr other = held.world.Submit(1, "w");
  held.world[1].engine->StartThread();
  EXPECT_TRUE(rank.engine->Wait(*work->handle, Soon()).ok());
  EXPECT_FALSE(rank.engine->stuck());
  held.world[1].engine->StopThread();
  rank.engine->StopThread();
}

}  // namespace
}  // namespace sirtaki::core
