// Checkpoints of sharded optimizers: a file for each rank beside the one of the rest, for any number of
// ranks that go on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sirtaki/barrier.h"
#include "sirtaki/checkpoint.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/session.h"
#include "tests/torch/checkpoint/scratch_folder.h"
#include "tests/torch/checkpoint/sharded_run.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
namespace fs = std::filesystem;

std::vector<torch::Tensor> TrainAtOnce(std::int64_t steps) {
  std::vector<torch::Tensor> trained;
  RunTorchRanks(1, [&](int) {
    ShardedRun run(/*sharded=*/false);
    run.TrainUntil(steps);
    trained = run.net.parameters();
  });
  return trained;
}

void TrainAndSave(const std::string& file, int ranks, std::int64_t steps, bool sharded = true) {
  RunTorchRanks(ranks, [&](int) {
    ShardedRun run(sharded);
    run.TrainUntil(steps);
    save_checkpoint(file, run.checkpoint());
  });
}

std::string ShardOf(const std::string& file, int rank) {
  for (const std::string& name : FilesBeside(file)) {
    if (name.find("." + std::to_string(rank) + "-of-") != std::string::npos) {
      return (fs::path(file).parent_path() / name).string();
    }
  }
  return {};
}

TEST(ShardedCheckpointTest, GoesOnWithAnyNumberOfRanksShardedOrNot) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  const auto expected = TrainAtOnce(6);
  TrainAndSave(file, 4, 3);
  EXPECT_EQ(FilesBeside(file).size(), 5);
  for (const auto& [ranks, sharded] :
       std::vector<std::pair<int, bool>>{{2, true}, {4, true}, {1, true}, {2, false}, {1, false}}) {
    RunTorchRanks(ranks, [&, sharded = sharded](int) {
      ShardedRun run(sharded);
      ASSERT_TRUE(load_checkpoint(file, run.checkpoint()));
      EXPECT_EQ(run.steps, 3);
      run.TrainUntil(6);
      EXPECT_EQ(Distance(run.net.parameters(), expected), 0);
    });
  }
}

TEST(ShardedCheckpointTest, ShardsOfAnotherMemoryFormatAreRefused) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  const auto net_of = [](bool last) {
    torch::nn::Conv2d net(torch::nn::Conv2dOptions(4, 8, 3).bias(false));
    if (last) {
      net->weight.set_data(net->weight.contiguous(torch::MemoryFormat::ChannelsLast));
    }
    return net;
  };
  RunTorchRanks(2, [&](int) {
    for (const bool is_same : {true, false}) {
      for (const bool last : {false, true}) {
        const auto make = [](torch::nn::Conv2d& net) {
          return DistributedOptimizer(AdamW(net->parameters(), AdamWOptions(0.1)),
                                      net->named_parameters(),
                                      DistributedOptimizerOptions().shard(Shard::OptimizerState));
        };
        auto net = net_of(last);
        auto optimizer = make(net);
        net(torch::ones({1, 4, 5, 5})).sum().backward();
        optimizer.step();
        save_checkpoint(file, Checkpoint().model(*net).optimizer(optimizer));
        auto other = net_of(is_same ? last : !last);
        auto of_other = make(other);
        const auto load = [&] {
          load_checkpoint(file, Checkpoint().model(*other).optimizer(of_other));
        };
        if (is_same) {
          load();
        } else {
          EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, load),
                      AllOf(HasSubstr("parameter 0 of group 0"), HasSubstr("memory format")));
        }
      }
    }
  });
}

TEST(ShardedCheckpointTest, OfShardsOverHostsTheFirstHostSavesThem) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  const auto expected = TrainAtOnce(6);
  const auto run_on = [&](const std::vector<int>& host_of_rank, bool begins) {
    RunTorchRanks(
        static_cast<int>(host_of_rank.size()),
        [&](int) {
          SmallNet net;
          auto optimizer = DistributedOptimizer(
              AdamW(net.parameters(), AdamWOptions(0.05).amsgrad(true)), net.named_parameters(),
              OptionsOf(true).shard_over(ShardOver::Host));
          const Checkpoint checkpoint = Checkpoint().model(net).optimizer(optimizer);
          ASSERT_TRUE(begins || load_checkpoint(file, checkpoint));
          for (int step = begins ? 0 : 3; step < (begins ? 3 : 6); ++step) {
            optimizer.zero_grad();
            Loss(net, BatchOfRank(step, 0)).backward();
            optimizer.step();
          }
          if (begins) save_checkpoint(file, checkpoint);
          EXPECT_TRUE(begins || Distance(net.parameters(), expected) == 0);
        },
        {}, host_of_rank);
  };
  run_on({0, 1, 0, 1}, /*begins=*/true);
  run_on({0, 0, 1, 1}, /*begins=*/false);
  run_on({0, 1}, /*begins=*/false);
  RunTorchRanks(2, [&](int) {
    ShardedRun run(/*sharded=*/true);
    ASSERT_TRUE(load_checkpoint(file, Checkpoint().model(run.net).optimizer(run.optimizer)));
    run.steps = 3;
    run.TrainUntil(6);
    EXPECT_EQ(Distance(run.net.parameters(), expected), 0);
  });
}

TEST(ShardedCheckpointTest, ReadsAFileOfAnOptimizerThatWasNotSharded) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  const auto expected = TrainAtOnce(6);
  TrainAndSave(file, 2, 3, /*sharded=*/false);
  RunTorchRanks(2, [&](int) {
    ShardedRun run(/*sharded=*/true);
    run.TrainUntil(2);  // and goes back
    ASSERT_TRUE(load_checkpoint(file, run.checkpoint()));
    run.TrainUntil(6);
    EXPECT_EQ(Distance(run.net.parameters(), expected), 0);
  });
}

TEST(ShardedCheckpointTest, TheFilesOfTheSaveBeforeGo) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  const auto expected = TrainAtOnce(4);
  RunTorchRanks(3, [&](int rank) {
    ShardedRun run(/*sharded=*/true);
    save_checkpoint(file, run.checkpoint());
    EXPECT_EQ(rank == 0 ? FilesBeside(file).size() : 1, 1) << "the state is whole yet";
    for (std::int64_t steps : {1, 2, 3}) {
      run.TrainUntil(steps);
      save_checkpoint(file, run.checkpoint());
      EXPECT_EQ(rank == 0 ? FilesBeside(file).size() : 4, 4);
    }
    ShardedRun other(/*sharded=*/true);
    ASSERT_TRUE(load_checkpoint(file, other.checkpoint()));
    other.TrainUntil(4);
    EXPECT_LT(Distance(other.net.parameters(), expected), 1e-12);
    save_checkpoint(folder.File("other.pt"), other.checkpoint());
    EXPECT_EQ(rank == 0 ? FilesBeside(file).size() : 8, 8) << "another run's stay";
  });
  TrainAndSave(file, 2, 1, /*sharded=*/false);
  EXPECT_EQ(FilesBeside(file).size(), 5);
}

TEST(ShardedCheckpointTest, AShardThatIsMissingDamagedOrOfAnotherSaveChangesNothing) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  TrainAndSave(file, 2, 3);
  const std::string shard = ShardOf(file, 1);
  const ScratchFolder kept;
  fs::copy_file(shard, kept.File("shard"));
  const auto expect_refused = [&](const std::string& why) {
    RunTorchRanks(2, [&](int) {
      ShardedRun run(/*sharded=*/true);
      run.TrainUntil(1);
      ShardedRun same(/*sharded=*/true);
      same.TrainUntil(2);
      EXPECT_THAT(
          ErrorOf(ErrorCode::InvalidArgument, [&] { load_checkpoint(file, run.checkpoint()); }),
          AllOf(HasSubstr(fs::path(shard).filename().string()), HasSubstr(why)));
      run.TrainUntil(2);
      EXPECT_EQ(Distance(run.net.parameters(), same.net.parameters()), 0);
    });
  };
  fs::remove(shard);
  expect_refused("is missing");
  {
    fs::copy_file(kept.File("shard"), shard);
    std::fstream bytes(shard, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekp(100);
    bytes.put('!');
  }
  expect_refused("is damaged");
  const ScratchFolder others;
  TrainAndSave(others.File("run.pt"), 2, 3);
  fs::copy_file(ShardOf(others.File("run.pt"), 1), shard, fs::copy_options::overwrite_existing);
  expect_refused("is of another save");
}

// Halves of a parameter have as many elements together as the whole, whichever halves they are.
TEST(ShardedCheckpointTest, AShardThatIsACopyOfAnotherRanksIsRefused) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  RunTorchRanks(2, [&](int rank) {
    torch::nn::Linear net(torch::nn::LinearOptions(8, 8).bias(false));
    auto optimizer = DistributedOptimizer(AdamW(net->parameters(), AdamWOptions(0.05)),
                                          net->named_parameters(), OptionsOf(/*sharded=*/true));
    net->weight.pow(2).sum().backward();
    optimizer.step();
    const Checkpoint checkpoint = Checkpoint().optimizer(optimizer);
    save_checkpoint(file, checkpoint);
    ASSERT_TRUE(load_checkpoint(file, checkpoint));
    if (rank == 0) {
      fs::copy_file(ShardOf(file, 0), ShardOf(file, 1), fs::copy_options::overwrite_existing);
    }
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { load_checkpoint(file, checkpoint); }),
                AllOf(HasSubstr(file),
                      HasSubstr("parameter 0 of group 0, float32 [8, 8]: the shards have the "
                                "elements 0 to 31, 0 to 31, instead of each of 64 once")));
  });
}

TEST(ShardedCheckpointTest, TwoOptimizersOfWhichOneIsSharded) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  RunTorchRanks(2, [&](int) {
    const auto train = [](ShardedRun& sharded, ShardedRun& whole, std::int64_t until) {
      sharded.TrainUntil(until);
      whole.TrainUntil(until);
    };
    ShardedRun sharded(true);
    ShardedRun whole(false);
    train(sharded, whole, 2);
    const auto checkpoint = [](ShardedRun& a, ShardedRun& b) {
      return Checkpoint()
          .model(a.net, "a")
          .model(b.net, "b")
          .optimizer(a.optimizer, "a")
          .optimizer(b.optimizer, "b");
    };
    save_checkpoint(file, checkpoint(sharded, whole));
    ShardedRun first(true);
    ShardedRun second(false);
    load_checkpoint(file, checkpoint(first, second));
    first.steps = second.steps = 2;
    train(sharded, whole, 4);
    train(first, second, 4);
    EXPECT_EQ(Distance(first.net.parameters(), sharded.net.parameters()), 0);
    EXPECT_EQ(Distance(second.net.parameters(), whole.net.parameters()), 0);
  });
}

CheckpointOptions Behind() { return CheckpointOptions().write_behind(true); }

TEST(ShardedCheckpointTest, WrittenBehindItHasWhatTheRunWasAtTheCall) {
  const ScratchFolder folder;
  for (const bool sharded : {true, false}) {
    const std::string file = folder.File(sharded ? "sharded.pt" : "whole.pt");
    const auto expected = TrainAtOnce(5);
    RunTorchRanks(3, [&](int) {
      ShardedRun run(sharded);
      for (const std::int64_t steps : {1, 3}) {  // the second save waits for the first
        run.TrainUntil(steps);
        save_checkpoint(file, run.checkpoint(), Behind());
      }
      run.TrainUntil(5);
      ShardedRun other(sharded);
      ASSERT_TRUE(load_checkpoint(file, other.checkpoint())) << "which waits, too";
      EXPECT_EQ(other.steps, 3);
      other.TrainUntil(5);
      EXPECT_LT(Distance(other.net.parameters(), expected), 1e-12);
      finish_checkpoint();  // there is none to wait for
    });
  }
  EXPECT_EQ(FilesBeside(folder.File("whole.pt")).size(), 5)
      << "nothing is left of the saves before";
}

TEST(ShardedCheckpointTest, WrittenBehindItIsThereWithoutAWait) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  RunTorchRanks(3, [&](int rank) {
    ShardedRun run(/*sharded=*/true);
    run.TrainUntil(1);
    save_checkpoint(file, run.checkpoint(), Behind());
    while (rank == 0 && !fs::exists(file)) std::this_thread::yield();
    barrier();
  });
  RunTorchRanks(2, [&](int) {
    ShardedRun run(/*sharded=*/true);
    EXPECT_TRUE(load_checkpoint(file, run.checkpoint()));
  });
}

TEST(ShardedCheckpointTest, WhatCannotBeWrittenBehindIsThrownOnAllRanksAtTheNextWait) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  const auto waits = std::vector<std::function<void(const Checkpoint&)>>{
      [](const Checkpoint&) { finish_checkpoint(); },
      [&](const Checkpoint& checkpoint) { save_checkpoint(file, checkpoint); },
      [&](const Checkpoint& checkpoint) { load_checkpoint(file, checkpoint); }};
  for (const int bad : {0, 1, 2}) {
    RunTorchRanks(3, [&](int rank) {
      ShardedRun run(/*sharded=*/true);
      run.TrainUntil(1);
      save_checkpoint(file, run.checkpoint());
      run.TrainUntil(2);
      // Each rank names the file, and the folder of this one is not there.
      save_checkpoint(rank == bad ? folder.File("nowhere/run.pt") : file, run.checkpoint(),
                      Behind());
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                          [&] { waits[static_cast<std::size_t>(bad)](run.checkpoint()); }),
                  AllOf(HasSubstr("nowhere/run.pt"), HasSubstr("No such file or directory"),
                        HasSubstr("on rank " + std::to_string(bad))));
      barrier();
      ASSERT_TRUE(load_checkpoint(file, run.checkpoint())) << "the one before";
      EXPECT_EQ(run.steps, 1);
      run.TrainUntil(2);
      save_checkpoint(file, run.checkpoint(), Behind());
      finish_checkpoint();
      EXPECT_EQ(rank == 0 ? FilesBeside(file).size() : 4, 4) << "what was left is gone";
      barrier();
    });
  }
}

TEST(ShardedCheckpointTest, TheRanksAgreeOnWritingBehind) {
  const ScratchFolder folder;
  RunTorchRanks(2, [&](int rank) {
    ShardedRun run(/*sharded=*/true);
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          save_checkpoint(folder.File("run.pt"), run.checkpoint(),
                                          CheckpointOptions().write_behind(rank == 1));
                        }),
                HasSubstr("write_behind"));
  });
}

TEST(ShardedCheckpointTest, OfSetsThatAreShardedEachTheFirstOneIsSaved) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  const auto expected = TrainAtOnce(5);
  RunTorchRanks(4, [&](int rank) {
    const ProcessSet low = add_process_set({0, 1});
    const ProcessSet high = add_process_set({2, 3});
    const ProcessSet& mine = rank < 2 ? low : high;
    ShardedRun run(true, mine);
    run.TrainUntil(3);
    save_checkpoint(file, run.checkpoint());
    ShardedRun other(true, mine);
    ASSERT_TRUE(load_checkpoint(file, other.checkpoint()));
    other.TrainUntil(5);
    EXPECT_EQ(Distance(other.net.parameters(), expected), 0);
  });
}

// A set of one rank has no shards, and no set has them before its first step.
TEST(ShardedCheckpointTest, TheSetOfRankZeroDecidesWhetherThereAreShards) {
  struct Case {
    std::vector<int> low, high;
    bool high_steps;
    std::size_t files;
  };
  const auto expected = TrainAtOnce(5);
  for (const Case& one :
       {Case{{0, 1}, {2}, true, 4}, Case{{0}, {1, 2}, true, 1}, Case{{0, 1}, {2, 3}, false, 5}}) {
    const ScratchFolder folder;
    const std::string file = folder.File("run.pt");
    const auto ranks = static_cast<int>(one.low.size() + one.high.size());
    RunTorchRanks(ranks, [&](int rank) {
      const ProcessSet low = add_process_set(one.low);
      const ProcessSet high = add_process_set(one.high);
      const bool is_low = rank <= one.low.back();
      ShardedRun run(true, is_low ? low : high);
      if (is_low || one.high_steps) run.TrainUntil(3);
      save_checkpoint(file, run.checkpoint());
      EXPECT_EQ(rank == 0 ? FilesBeside(file).size() : one.files, one.files);
      ShardedRun other(true, is_low ? low : high);
      ASSERT_TRUE(load_checkpoint(file, other.checkpoint()));
      EXPECT_EQ(other.steps, 3);
      other.TrainUntil(5);
      EXPECT_EQ(Distance(other.net.parameters(), expected), 0);
    });
    RunTorchRanks(2, [&](int) {
      ShardedRun run(true);
      ASSERT_TRUE(load_checkpoint(file, run.checkpoint()));
      run.TrainUntil(5);
      EXPECT_EQ(Distance(run.net.parameters(), expected), 0);
    });
  }
}

// Each host may have a folder of this name on a disk of its own.
TEST(ShardedCheckpointTest, ShardsInAFolderThatIsNotSharedDoNotReplaceTheCheckpoint) {
  const ScratchFolder folder;
  const ScratchFolder of_other_host;
  const std::string file = folder.File("run.pt");
  core::Config config;
  config.stall_limit = std::chrono::seconds(2);  // half of it is waited for the shards
  RunTorchRanks(
      2,
      [&](int rank) {
        ShardedRun run(/*sharded=*/true);
        run.TrainUntil(1);
        save_checkpoint(file, run.checkpoint());
        run.TrainUntil(2);
        const std::string own = rank == 0 ? file : of_other_host.File("run.pt");
        EXPECT_THAT(
            ErrorOf(ErrorCode::InvalidArgument, [&] { save_checkpoint(own, run.checkpoint()); }),
            AllOf(HasSubstr(file + ": the shards of rank 1 are not in its folder"),
                  HasSubstr("one that all hosts share"), HasSubstr("(on rank 0)")));
        barrier();
        EXPECT_EQ(FilesBeside(own).size(), rank == 0 ? 3 : 0) << "what is of no use is gone";
        ASSERT_TRUE(load_checkpoint(file, run.checkpoint()));
        EXPECT_EQ(run.steps, 1);
      },
      config);
}

}  // namespace
}  // namespace sirtaki::tests
