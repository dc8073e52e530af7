// A checkpoint that is written behind, to a disk that hangs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <barrier>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "frameworks/torch/checkpoint/checkpoint_save.h"
#include "frameworks/torch/checkpoint/checkpoint_shards.h"
#include "frameworks/torch/session/session_state.h"
#include "sirtaki/barrier.h"
#include "sirtaki/checkpoint.h"
#include "sirtaki/session.h"
#include "tests/torch/checkpoint/held_disk.h"
#include "tests/torch/checkpoint/scratch_folder.h"
#include "tests/torch/checkpoint/sharded_run.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::UnorderedElementsAre;

CheckpointOptions BehindWithin(milliseconds timeout) {
  return CheckpointOptions().write_behind(true).timeout(timeout);
}

// What a run saved last has these steps.
void ExpectStepsIn(const std::string& file, std::int64_t steps) {
  ShardedRun other(/*sharded=*/true);
  ASSERT_TRUE(load_checkpoint(file, other.checkpoint()));
  EXPECT_EQ(other.steps, steps);
  ShardedRun expected(/*sharded=*/true);
  expected.TrainUntil(steps);
  EXPECT_EQ(Distance(other.net.parameters(), expected.net.parameters()), 0);
}

TEST(SaveBehindTest, WhatIsTooLateIsGivenUpOnAllRanks) {
  for (const int late : {0, 1}) {
    const ScratchFolder folder;
    const std::string file = folder.File("run.pt");
    HeldDisk disk(late == 0 ? "run.pt.tmp" : ".1-of-2.tmp");
    disk.Release();
    RunTorchRanks(2, [&](int rank) {
      ShardedRun run(/*sharded=*/true);
      run.TrainUntil(1);
      save_checkpoint(file, run.checkpoint());
      run.TrainUntil(2);
      if (rank == 0) disk.Hold();
      barrier();
      save_checkpoint(file, run.checkpoint(), BehindWithin(milliseconds(200)));
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [] { finish_checkpoint(); }),
                  AllOf(HasSubstr(file + ": it was not written within 200 ms, the timeout"),
                        HasSubstr("it is given up, and the checkpoint before it stays"),
                        HasSubstr("give it a longer timeout"),
                        HasSubstr("(on rank " + std::to_string(late) + ")")));
      ExpectStepsIn(file, 1);
      EXPECT_THAT(
          ErrorOf(ErrorCode::InvalidArgument, [&] { save_checkpoint(file, run.checkpoint()); }),
          AllOf(HasSubstr(file + ": an earlier save has not ended within 200 ms"),
                HasSubstr("(on rank " + std::to_string(late) + ")")));
      if (rank == 0) disk.Release();
      for (bool ended = false; !ended;) {  // each call waits for 200 ms
        try {
          finish_checkpoint();
          ended = true;
        } catch (const Error& error) {
          EXPECT_THAT(error.what(), HasSubstr("an earlier save has not ended"));
        }
      }
      ExpectStepsIn(file, 1);
      save_checkpoint(file, run.checkpoint(), CheckpointOptions().write_behind(true));
      finish_checkpoint();
      ExpectStepsIn(file, 2);
      barrier();
      EXPECT_EQ(FilesBeside(file).size(), 3) << "what was left is gone";
      barrier();
    });
  }
}

TEST(SaveBehindTest, AProgramMayChangeItsDirectoryMeanwhile) {
  const ScratchFolder folder;
  HeldDisk disk("run.pt.tmp");
  RunTorchRanks(1, [&](int) {
    ShardedRun run(/*sharded=*/false);
    run.TrainUntil(1);
    const std::filesystem::path before = std::filesystem::current_path();
    std::filesystem::current_path(std::filesystem::path(folder.File("run.pt")).parent_path());
    save_checkpoint("run.pt", run.checkpoint(), CheckpointOptions().write_behind(true));
    std::filesystem::current_path(before);
    disk.Release();
    finish_checkpoint();
    ExpectStepsIn(folder.File("run.pt"), 1);
  });
}

// Nobody else waits there, who could be told by the job.
TEST(SaveBehindTest, WithoutATimeoutTheStallLimitEndsTheWait) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  HeldDisk disk("run.pt.tmp");
  core::Config config;
  config.stall_warning = milliseconds(20);
  config.stall_limit = milliseconds(60);
  RunTorchRanks(
      1,
      [&](int) {
        ShardedRun run(/*sharded=*/false);
        save_checkpoint(file, run.checkpoint(), CheckpointOptions().write_behind(true));
        testing::internal::CaptureStderr();
        const std::string error = ErrorOf(ErrorCode::InvalidArgument, [] { finish_checkpoint(); });
        EXPECT_THAT(testing::internal::GetCapturedStderr(),
                    HasSubstr("save_checkpoint, written behind: " + file + ": it was not written"));
        EXPECT_THAT(error, HasSubstr(file + ": it was not written within 60 ms, the stall_limit"));
      },
      config);
}

// The others wait for the rank whose disk hangs, and are told before they take it for lost.
TEST(SaveBehindTest, ADiskThatHangsLongerThanTheStallLimitIsNoFaultOfTheJob) {
  core::Config config;
  config.stall_limit = milliseconds(1500);
  for (const milliseconds timeout : {milliseconds(0), milliseconds(2000)}) {
    const ScratchFolder folder;
    const std::string file = folder.File("run.pt");
    HeldDisk disk(".1-of-2.tmp");
    disk.Release();
    RunTorchRanks(
        2,
        [&](int rank) {
          ShardedRun run(/*sharded=*/true);
          run.TrainUntil(1);
          save_checkpoint(file, run.checkpoint());
          run.TrainUntil(2);
          if (rank == 0) disk.Hold();
          barrier();
          save_checkpoint(file, run.checkpoint(), BehindWithin(timeout));
          EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [] { finish_checkpoint(); }),
                      AllOf(HasSubstr(file + ": it was not written within " +
                                      (timeout.count() == 0 ? "1500 ms, the stall_limit"
                                                            : "2000 ms, the timeout")),
                            HasSubstr("(on rank 1)")));
          barrier();
          ExpectStepsIn(file, 1);
        },
        config);
  }
}

TEST(SaveBehindTest, ShardsThatNeverComeAreBlamedOnTheFolder) {
  const ScratchFolder folder;
  const ScratchFolder of_other_host;
  const std::string file = folder.File("run.pt");
  core::Config config;
  config.stall_limit = milliseconds(1500);
  RunTorchRanks(
      2,
      [&](int rank) {
        ShardedRun run(/*sharded=*/true);
        run.TrainUntil(1);
        save_checkpoint(file, run.checkpoint());
        run.TrainUntil(2);
        save_checkpoint(rank == 0 ? file : of_other_host.File("run.pt"), run.checkpoint(),
                        BehindWithin(milliseconds(2000)));
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [] { finish_checkpoint(); }),
                    AllOf(HasSubstr(file + ": the shards of rank 1 were not in its folder"),
                          HasSubstr("one that all hosts share"), Not(HasSubstr("slow")),
                          HasSubstr("(on rank 0)")));
        ExpectStepsIn(file, 1);
      },
      config);
}

TEST(SaveBehindTest, ASessionDoesNotWaitForADiskThatHangs) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  HeldDisk disk("run.pt.tmp");
  RunTorchRanks(1, [&](int) {
    ShardedRun run(/*sharded=*/false);
    save_checkpoint(file, run.checkpoint(), BehindWithin(milliseconds(50)));
    disk.Await();
  });
  EXPECT_FALSE(std::filesystem::exists(file));
}

// The end of the program and shutdown() wait in this way.
TEST(SaveBehindTest, AFaultEndsTheWaitForARanksOwnPart) {
  const ScratchFolder folder;
  HeldDisk disk("run.pt.tmp");
  RunTorchRanks(1, [&](int) {
    ShardedRun run(/*sharded=*/false);
    save_checkpoint(folder.File("run.pt"), run.checkpoint(),
                    CheckpointOptions().write_behind(true));
    disk.Await();
    const auto state = detail::CurrentSession();
    const auto save = state->save();
    std::thread ending([&] { save->WaitForOwn(); });
    abort("the loss is NaN");
    ending.join();
    EXPECT_FALSE(save->is_given_up());
    disk.Release();
  });
}

// An elastic job, say, ends a session and begins another in the same process.
TEST(SaveBehindTest, ASaveThatWasGivenUpRemovesNothingOfALaterOne) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  const std::string path = std::filesystem::path(file).parent_path();
  // It hangs where the name of the first file comes to the disk, behind those of both ranks' shards.
  HeldDisk disk(path, HeldDisk::Delay::max(), /*passed=*/2);
  std::weak_ptr<const detail::SaveUnderWay> first;
  std::barrier is_held(2);
  RunTorchRanks(2, [&](int rank) {
    ShardedRun run(/*sharded=*/true);
    run.TrainUntil(1);
    save_checkpoint(file, run.checkpoint(), BehindWithin(milliseconds(200)));
    if (rank == 0) {
      disk.Await();
      first = detail::CurrentSession()->save();
    }
    is_held.arrive_and_wait();  // rank 1 must not give its part up before that
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [] { finish_checkpoint(); }),
                HasSubstr("it or the checkpoint before it is there, and whole"));
  });
  RunTorchRanks(2, [&](int rank) {
    ShardedRun run(/*sharded=*/true);
    run.TrainUntil(2);
    if (rank == 0) disk.LetOthersPass();
    barrier();
    save_checkpoint(file, run.checkpoint());
    if (rank == 0) {
      disk.Release();
      const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      while (!first.expired() && std::chrono::steady_clock::now() < limit) {
        std::this_thread::sleep_for(milliseconds(1));
      }
      EXPECT_TRUE(first.expired()) << "the thread of the first save does not end";
    }
    barrier();
    ExpectStepsIn(file, 2);
  });
}

// A thread that was left behind may remove what it removes when a later save has begun.
TEST(SaveBehindTest, ASaveRemovesOnlyShardsThatWereThereBeforeItself) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  const auto write = [&](const std::string& number) {
    const auto archive = [&] {
      torch::serialize::OutputArchive made;
      made.write("save", c10::IValue(number));
      return made;
    };
    auto save = std::make_unique<detail::CheckpointSave>(
        file, detail::ShardFiles(file, number, /*ranks=*/1), /*rank=*/0);
    save->TakeShards(archive());
    save->TakeRest(archive());
    save->Write();
    save->Name();
    return save;
  };
  const std::string earlier = "000000000000000a";
  const std::string slow = "000000000000000b";
  const std::string later = "000000000000000c";
  const auto shards_of = [](const std::string& number) {
    return "run.pt.shards." + number + ".0-of-1";
  };
  write(earlier)->Publish();
  const auto save = write(slow);
  save->Publish();
  write(later)->Publish();
  save->RemoveEarlier();
  EXPECT_THAT(FilesBeside(file), UnorderedElementsAre("run.pt", shards_of(slow), shards_of(later)));
}

}  // namespace
}  // namespace sirtaki::tests
