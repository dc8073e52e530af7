// When an engine comes back by itself, and what it holds until then.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/core/engine/engine_world.h"

namespace sirtaki::core {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(EngineTest, IdleEnginesOfARingingTransportSleepLong) {
  World world(2);
  world.Submit(0, "w");
  world.Submit(1, "w");
  world.Settle();
  world.now += seconds(1);
  world.Settle();
  EXPECT_GE(world[0].engine->NextWake(world.now), world.now + milliseconds(100));
}

TEST(EngineTest, WithoutRingingThePollCoolsDown) {
  World world(2);
  world[0].transport->rings = false;
  const WorkPtr work = world.Submit(0, "w");
  world.Settle();
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + microseconds(20));
  world.now += milliseconds(10);
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + microseconds(500));
  world.now += seconds(1);
  world[0].engine->RunOnce();
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + milliseconds(1));
  world.Submit(1, "w");
  world.Settle();
  ASSERT_TRUE(work->handle->done());
  world.now += seconds(1);
  world.Settle();
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + milliseconds(10));
}

// What it waited for has deadlines, which are soon over.
TEST(EngineTest, AfterAFaultNothingWakesIt) {
  World world(2);
  world.Submit(0, "w");
  world.Submit(1, "v");
  world.Settle();
  world[1].engine->PostFailure(Status(StatusCode::kBackend, "broken"), "x");
  world.Settle();
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_FALSE(world[rank].engine->fault().ok());
    EXPECT_GE(world[rank].engine->NextWake(world.now + seconds(60)), world.now + seconds(61));
  }
}

TEST(EngineTest, UnfinishedNonBlockingCallsAskForThePoll) {
  World world(2);
  for (int rank = 0; rank < 2; ++rank) {
    world[rank].executor.at_once = false;
    world[rank].executor.needs_stepping = true;
    world.Submit(rank, "w");
  }
  world.Settle();
  world.now += seconds(1);
  world[0].engine->RunOnce();
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + milliseconds(1));
}

// They may be far apart, since something rings; but a lost peer rings nobody.
TEST(EngineTest, NonBlockingCallsThatRingAskForNoPoll) {
  World world(2);
  for (int rank = 0; rank < 2; ++rank) {
    world[rank].executor.at_once = false;
    world[rank].executor.needs_stepping = true;
    world[rank].executor.rings = true;
    world.Submit(rank, "w");
  }
  world.Settle();
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + milliseconds(50));
  world[0].transport->rings = false;
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + microseconds(20));
}

TEST(EngineTest, AFullOutboxAsksForThePoll) {
  World world(2);
  world[0].transport->flushed = false;
  world.Submit(0, "w");
  world.Settle();
  world.now += milliseconds(1);
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + microseconds(50));
}

// Rounds as the background thread of rank 0 makes them; the other rank has submitted the same.
class EngineHoldTest : public ::testing::Test {
 protected:
  void SubmitOnBoth(const std::string& name) {
    world_.Submit(1, name);
    world_[1].engine->RunOnce();
    world_.Submit(0, name);
  }
  std::size_t Started() {
    world_[0].engine->RunOnce(/*waited_for=*/false);
    return world_[0].executor.started.size();
  }

  World world_{2};
};

TEST_F(EngineHoldTest, WorkThatNobodyWaitsForIsGatheredForAMoment) {
  SubmitOnBoth("a");
  EXPECT_EQ(Started(), 0U);
  EXPECT_EQ(world_[0].engine->NextWake(world_.now), world_.now + microseconds(50));
  world_.now += microseconds(49);
  EXPECT_EQ(Started(), 0U);
  world_.now += microseconds(1);
  EXPECT_EQ(Started(), 1U);
}

TEST_F(EngineHoldTest, WhatFollowsIsWaitedForButNotForEver) {
  const TimePoint start = world_.now;
  int submitted = 0;
  while (world_.now < start + microseconds(500)) {
    SubmitOnBoth(std::to_string(submitted++));
    ASSERT_EQ(Started(), 0U) << "after " << (world_.now - start).count() << " ns";
    world_.now += microseconds(25);
  }
  EXPECT_EQ(Started(), static_cast<std::size_t>(submitted));
}

TEST_F(EngineHoldTest, AThreadThatWaitsHoldsNothing) {
  SubmitOnBoth("a");
  EXPECT_EQ(Started(), 0U);
  world_[0].engine->RunOnce(/*waited_for=*/true);
  EXPECT_EQ(world_[0].executor.started.size(), 1U);
  // What comes next is held anew.
  SubmitOnBoth("b");
  EXPECT_EQ(Started(), 1U);
}

TEST_F(EngineHoldTest, AMessageIsNotHeldNorWhatWasBeforeIt) {
  SubmitOnBoth("a");
  EXPECT_EQ(Started(), 0U);
  auto signature = std::make_shared<Signature>();
  signature->kind = OpKind::kSend;
  auto work = std::make_shared<Work>();
  work->request = {Key::Named(kWorldSet, "#message"), std::move(signature), {}, {}};
  ASSERT_TRUE(world_[0].engine->Submit(work, false).ok());
  EXPECT_EQ(Started(), 1U);
  EXPECT_EQ(world_[0].executor.messages.size(), 1U);
}

}  // namespace
}  // namespace sirtaki::core
