// RANKS: 1 2
// A checkpoint that is written behind, when the job ends and in processes that fork.
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/within.h"
#include "tests/torch/checkpoint/held_disk.h"
#include "tests/torch/checkpoint/scratch_folder.h"
#include "tests/torch/checkpoint/sharded_run.h"

namespace sirtaki::tests {
namespace {

using std::chrono::milliseconds;

class SaveBehindTest : public testing::Test {
 protected:
  void SetUp() override { init(); }
  void TearDown() override {
    barrier();  // the folder is rank 0's
    shutdown();
  }
  // All ranks write to that of rank 0.
  std::string File() { return broadcast_object(folder_.File("run.pt"), 0); }

 private:
  const ScratchFolder folder_;
};

void ExpectStepsIn(const std::string& file, bool sharded, std::int64_t steps) {
  ShardedRun other(sharded);
  ASSERT_TRUE(load_checkpoint(file, other.checkpoint()));
  EXPECT_EQ(other.steps, steps);
  ShardedRun expected(sharded);
  expected.TrainUntil(steps);
  EXPECT_EQ(Distance(other.net.parameters(), expected.net.parameters()), 0);
}

TEST_F(SaveBehindTest, ShutdownEndsBehindTheDisk) {
  const std::string file = File();
  for (const bool sharded : {false, true}) {
    // This rank's file with shards, or rank 0's with the rest.
    const HeldDisk slow(".tmp", milliseconds(200));
    ShardedRun run(sharded);
    run.TrainUntil(sharded ? 4 : 2);
    save_checkpoint(file, run.checkpoint(), CheckpointOptions().write_behind(true));
    shutdown();
    init();
    ExpectStepsIn(file, sharded, sharded ? 4 : 2);
  }
}

TEST_F(SaveBehindTest, ShutdownDoesNotWaitForADiskThatHangs) {
  const std::string file = File();
  ShardedRun run(/*sharded=*/true);
  run.TrainUntil(1);
  save_checkpoint(file, run.checkpoint());
  run.TrainUntil(2);
  const bool sharded = size() > 1;
  const bool hangs = rank() == size() - 1;
  HeldDisk disk(hangs ? sharded ? ".1-of-2.tmp" : "run.pt.tmp" : "nothing");
  save_checkpoint(file, run.checkpoint(),
                  CheckpointOptions().write_behind(true).timeout(milliseconds(50)));
  if (hangs) disk.Await();
  shutdown();
  disk.Release();
  init();
  ExpectStepsIn(file, sharded, 1);
}

// The others wait in shutdown() for the rank whose disk is slow: it leaves the job before they take it
// for lost, and waits for its disk behind that.
TEST_F(SaveBehindTest, ADiskThatIsSlowerThanTheStallLimitIsNoFaultInShutdown) {
  const std::string file = File();
  barrier();
  shutdown();
  init(InitOptions().stall_limit(std::chrono::seconds(2)));
  const HeldDisk slow("run.pt.tmp", std::chrono::seconds(3));
  ShardedRun run(/*sharded=*/false);
  run.TrainUntil(2);
  save_checkpoint(file, run.checkpoint(),
                  CheckpointOptions().write_behind(true).timeout(std::chrono::minutes(10)));
  testing::internal::CaptureStderr();
  shutdown();
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  init();
  ExpectStepsIn(file, /*sharded=*/false, 2);
}

// Nobody waits for a part of a checkpoint of a job that has failed.
TEST_F(SaveBehindTest, AfterAFaultTheSessionEndsBeforeTheDiskIsWaitedFor) {
  const std::string file = File();
  {
    ShardedRun run(/*sharded=*/false);
    HeldDisk disk("run.pt.tmp");
    save_checkpoint(file, run.checkpoint(), CheckpointOptions().write_behind(true));
    if (rank() == 0) {
      disk.Await();
      abort("the loss is NaN");
    }
    std::thread ending([] { shutdown(); });
    EXPECT_TRUE(Within(std::chrono::seconds(60), [] { return !is_initialized(); }));
    disk.Release();
    ending.join();
  }
  init();
  ExpectStepsIn(file, /*sharded=*/false, 0);
}

// The workers of a data loader are such children.
TEST_F(SaveBehindTest, AForkedChildLeavesTheSaveAlone) {
  const std::string file = File();
  for (const char* const held : {"run.pt.tmp", ".tmp"}) {
    ShardedRun run(/*sharded=*/true);
    run.TrainUntil(2);
    const bool holds = rank() == 0 || held == std::string(".tmp");
    HeldDisk disk(holds ? held : "nothing");
    save_checkpoint(file, run.checkpoint(), CheckpointOptions().write_behind(true));
    if (holds) disk.Await();
    const pid_t child = fork();
    if (child == 0) {
      try {
        finish_checkpoint();
        _exit(1);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::NotInitialized) _exit(2);
      }
      shutdown();
      _exit(0);
    }
    ASSERT_GT(child, 0);
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    disk.Release();
    finish_checkpoint();
    ExpectStepsIn(file, size() > 1, 2);
    barrier();
  }
}

}  // namespace
}  // namespace sirtaki::tests
