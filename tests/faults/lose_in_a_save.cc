// lose_in_a_save HOW FILE VICTIM [--sirtaki-…]: two ranks train with a sharded optimizer, save a
// checkpoint after 2 steps, and write one behind after 4 steps while something ends them.
//
//   shard    the victim is killed when its shards are written and not yet on the disk
//   file     rank 0 is killed when the file at the path is written and not yet on the disk
//   folder   rank 0 is killed when that has taken the place of the one before, in a folder that is not
//            yet on the disk
//   exits    they end with 0, and do nothing for the save, which a slow disk takes
//   fails    they end with an exception that main() catches
//   load     they go on from what is there, and save again. VICTIM is the number of steps that the
//            checkpoint may have: 2, 4, or 24 for both
//
// Each rank prints "rank R is process P" first. One that is left prints "rank R after T ms: ERROR", T
// since the save, and ends with code 3 when all have told their error.
#include <sirtaki/torch.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/faults/told.h"
#include "tests/torch/checkpoint/held_disk.h"
#include "tests/torch/checkpoint/sharded_run.h"

namespace sirtaki::tests {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

[[noreturn]] void Refuse(const std::string& why) {
  Say(why);
  std::_Exit(2);
}

// The same without a job.
std::vector<torch::Tensor> TrainedAlone(std::int64_t steps) {
  SmallNet net;
  torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(0.05).amsgrad(true));
  for (std::int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    Loss(net, BatchOfRank(static_cast<int>(step), 0)).backward();
    optimizer.step();
  }
  return net.parameters();
}

int GoOn(const std::string& file, const std::string& steps) {
  ShardedRun run(/*sharded=*/true);
  if (!load_checkpoint(file, run.checkpoint())) Refuse("WRONG: there is no checkpoint");
  if (steps.find(std::to_string(run.steps)) == std::string::npos) {
    Refuse("WRONG: the checkpoint has " + std::to_string(run.steps) + " steps");
  }
  Say("rank " + std::to_string(rank()) + " goes on from " + std::to_string(run.steps));
  if (Distance(run.net.parameters(), TrainedAlone(run.steps)) != 0) Refuse("WRONG parameters");
  run.TrainUntil(6);
  if (Distance(run.net.parameters(), TrainedAlone(6)) != 0) Refuse("WRONG: a later step");
  save_checkpoint(file, run.checkpoint());
  if (FilesBeside(file).size() != 3) Refuse("WRONG: files of another save are left");
  barrier();
  return 0;
}

// What becomes of the save after 4 steps.
void Arm(HeldDisk& disk, const std::string& how, const std::string& file, int victim) {
  if (how == "exits" || how == "fails" || rank() != victim) return;
  const bool has_replaced = how == "folder";
  disk.Do([has_replaced, file, before = std::filesystem::last_write_time(file)] {
    if (has_replaced && std::filesystem::last_write_time(file) == before) return;
    kill(getpid(), SIGKILL);
    for (;;) pause();
  });
}

std::string HeldIn(const std::string& how, const std::string& file, int victim) {
  if (how == "shard") return "." + std::to_string(victim) + "-of-2.tmp";
  if (how == "file") return std::filesystem::path(file).filename().string() + ".tmp";
  if (how == "folder") return std::filesystem::path(file).parent_path().filename().string();
  return ".tmp";
}

int Run(const std::string& how, const std::string& file, const std::string& victim_text) {
  Say("rank " + std::to_string(rank()) + " is process " + std::to_string(getpid()));
  if (how == "load") return GoOn(file, victim_text);
  const int victim = std::atoi(victim_text.c_str());
  ShardedRun run(/*sharded=*/true);
  run.TrainUntil(2);
  save_checkpoint(file, run.checkpoint());
  run.TrainUntil(4);
  barrier();
  // It stays: threads are in it when the program ends.
  auto& disk = *new HeldDisk(HeldIn(how, file, victim), milliseconds(200));
  Arm(disk, how, file, victim);
  const auto begin = steady_clock::now();
  try {
    save_checkpoint(file, run.checkpoint(), CheckpointOptions().write_behind(true));
    if (how == "exits") return 0;
    if (how == "fails") throw std::runtime_error("the data set ends in the middle of a record");
    run.TrainUntil(5);
    finish_checkpoint();
    barrier();  // behind which nobody waits for rank 0, which has published
  } catch (const Error& error) {
    const auto time = std::chrono::duration_cast<milliseconds>(steady_clock::now() - begin);
    Say("rank " + std::to_string(rank()) + " after " + std::to_string(time.count()) +
        " ms: " + error.what());
    AwaitTheOthers(1);
    return 3;
  }
  Refuse("WRONG: nothing has happened");
}

}  // namespace
}  // namespace sirtaki::tests

int main(int argc, char** argv) {
  sirtaki::init(argc, argv);
  if (argc != 4) {
    std::fputs("usage: lose_in_a_save HOW FILE VICTIM [--sirtaki-option=value]...\n", stderr);
    return 2;
  }
  try {
    return sirtaki::tests::Run(argv[1], argv[2], argv[3]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lose_in_a_save: %s\n", error.what());
    return 1;
  }
}
