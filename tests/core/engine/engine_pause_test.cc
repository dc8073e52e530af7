// Engines that are paused, in rounds.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "core/engine/engine.h"
#include "tests/core/engine/engine_world.h"

namespace sirtaki::core {
namespace {

using std::chrono::seconds;

TEST(EnginePauseTest, APausedEngineThatListensStartsNothing) {
  World world(2);
  const WorkPtr work = world.Submit(0, "w");
  world.Settle();
  ASSERT_TRUE(world[0].engine->Pause());
  world.Submit(0, "meanwhile");
  world.Submit(1, "w");
  for (int i = 0; i < 10; ++i) {
    world[1].engine->RunOnce();
    world[0].engine->Listen();
  }
  EXPECT_TRUE(world[0].executor.started.empty());
  EXPECT_FALSE(work->handle->done());
  world[0].engine->Resume();
  world.Submit(1, "meanwhile");
  world.Settle();
  EXPECT_EQ(world[0].executor.started, (std::vector<std::string>{"\"w\"", "\"meanwhile\""}));
}

TEST(EnginePauseTest, APausedEngineThatListensHearsOfAFault) {
  World world(2);
  const WorkPtr work = world.Submit(0, "w");
  world.Settle();
  ASSERT_TRUE(world[0].engine->Pause());
  world[1].engine->PostFailure(Status(StatusCode::kBackend, "broken"), "x");
  world[1].engine->RunOnce();
  world[0].engine->Listen();
  EXPECT_EQ(world[0].engine->fault().message(), "broken");
  ASSERT_TRUE(work->handle->done());
  EXPECT_EQ(work->handle->status().message(), "broken");
  EXPECT_EQ(world[0].executor.abandoned.message(), "broken");
}

TEST(EnginePauseTest, AnEngineThatIsNotPausedDoesNotListen) {
  World world(2);
  world.Submit(0, "w");
  world.Submit(1, "w");
  for (int i = 0; i < 10; ++i) {
    world[1].engine->RunOnce();
    world[0].engine->Listen();
  }
  EXPECT_TRUE(world[1].executor.started.empty());
}

// The first rank waits for one that does not answer.
TEST(EnginePauseTest, NobodyIsLostWhoMayBePaused) {
  World world(2);
  world.Submit(0, "w");
  world[0].engine->ExpectPauses(/*elsewhere=*/true);
  for (int i = 0; i < 600; ++i) {
    world.now += seconds(1);
    world[0].engine->RunOnce();
  }
  EXPECT_TRUE(world[0].engine->fault().ok()) << world[0].engine->fault().ToString();
  world[0].engine->ExpectPauses(/*elsewhere=*/false);
  for (int i = 0; i < 60; ++i) {
    world.now += seconds(1);
    world[0].engine->RunOnce();
  }
  EXPECT_EQ(world[0].engine->fault().code(), StatusCode::kPeerLost);
}

// A thread may be about to pause when another one ends the session.
TEST(EnginePauseTest, AnEngineThatEndsIsNotPausedAnyMore) {
  World world(1);
  ASSERT_TRUE(world[0].engine->Pause());
  EXPECT_TRUE(world[0].engine->Leave("done").ok());
  EXPECT_FALSE(world[0].engine->Pause());
}

}  // namespace
}  // namespace sirtaki::core
