// The program sirtaki-checkpoint, on files that ranks have saved.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "frameworks/torch/checkpoint/checkpoint_file.h"
#include "sirtaki/checkpoint.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/sampler.h"
#include "sirtaki/session.h"
#include "tests/torch/checkpoint/scratch_folder.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;
namespace fs = std::filesystem;

struct Ended {
  int code = -1;
  std::string output;  // both streams
};

Ended RunTool(const std::string& arguments) {
  Ended ended;
  FILE* const pipe = popen((SIRTAKI_CHECKPOINT_TOOL " " + arguments + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return ended;
  std::array<char, 4096> buffer{};
  for (std::size_t got = 1; got != 0;) {
    got = fread(buffer.data(), 1, buffer.size(), pipe);
    ended.output.append(buffer.data(), got);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) ended.code = WEXITSTATUS(status);
  return ended;
}

// One of its parameters does not lie row by row, one is tied, and one never has a gradient.
struct MixedNet : SmallNet {
  MixedNet() : conv(torch::nn::Conv2dOptions(3, 5, 2)) {
    register_module("conv", conv);
    unused = register_parameter("unused", torch::ones({2, 3}, torch::kDouble));
    conv->to(torch::kDouble);
    torch::NoGradGuard no_grad;
    conv->weight.set_data(Waves({5, 3, 2, 2}, 7).contiguous(torch::MemoryFormat::ChannelsLast));
    conv->bias.copy_(Waves({5}, 8));
  }
  torch::nn::Conv2d conv;
  torch::Tensor unused;
};

AdamOptions With(AdamOptions options, double lr) { return options.lr(lr).amsgrad(true); }
SGDOptions With(SGDOptions options, double lr) { return options.lr(lr).momentum(0.9); }

// All ranks have the same gradients, so that the number of ranks does not count.
template <class Optimizer>
struct ToolRun {
  using Options = std::conditional_t<std::is_same_v<Optimizer, Adam>, AdamOptions, SGDOptions>;

  explicit ToolRun(bool sharded)
      : optimizer(DistributedOptimizer(
            Optimizer(Groups(net), With(Options(0.1), 0.1)), net.named_parameters(),
            DistributedOptimizerOptions().shard(sharded ? Shard::OptimizerState : Shard::None))) {}

  static std::vector<torch::optim::OptimizerParamGroup> Groups(MixedNet& net) {
    const auto options = [](double lr) { return std::make_unique<Options>(With(Options(lr), lr)); };
    const torch::Tensor tied = net.hidden->weight;
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<torch::Tensor>{net.hidden->bias, net.output->bias, net.unused},
                        options(0.02));
    groups.emplace_back(std::vector<torch::Tensor>{tied, net.output->weight, net.conv->weight,
                                                   net.conv->bias, tied},
                        options(0.05));
    return groups;
  }

  Checkpoint checkpoint() {
    return Checkpoint().model(net).optimizer(optimizer).sampler(sampler).epoch(steps).value(
        "best accuracy", best);
  }

  void TrainUntil(std::int64_t until) {
    for (; steps < until; ++steps) {
      optimizer.zero_grad();
      const auto image = Waves({2, 3, 4, 4}, static_cast<double>(steps));
      (Loss(net, BatchOfRank(static_cast<int>(steps), 0)) + net.conv(image).pow(2).mean())
          .backward();
      optimizer.step();
    }
  }

  MixedNet net;
  DistributedOptimizer<Optimizer> optimizer;
  DistributedSampler sampler{10, DistributedSamplerOptions().seed(1)};
  std::int64_t steps = 0;
  double best = 0.25;
};

template <class Optimizer>
void TrainAndSave(const std::string& file, int ranks, bool sharded, std::int64_t steps = 3) {
  RunTorchRanks(ranks, [&](int) {
    ToolRun<Optimizer> run(sharded);
    run.TrainUntil(steps);
    save_checkpoint(file, run.checkpoint());
  });
}

template <class Optimizer>
std::vector<torch::Tensor> TrainAtOnce(std::int64_t steps) {
  std::vector<torch::Tensor> trained;
  RunTorchRanks(1, [&](int) {
    ToolRun<Optimizer> run(/*sharded=*/false);
    run.TrainUntil(steps);
    trained = run.net.parameters();
  });
  return trained;
}

std::string ShardOf(const std::string& file, int rank) {
  for (const auto& entry : fs::directory_iterator(fs::path(file).parent_path())) {
    const std::string name = entry.path().string();
    if (name.find("." + std::to_string(rank) + "-of-") != std::string::npos) return name;
  }
  return {};
}

void FlipByte(const std::string& file, std::int64_t at) {
  std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
  bytes.seekg(at);
  const int byte = bytes.get();
  bytes.seekp(at);
  bytes.put(static_cast<char>(byte ^ 1));
}

// What `list` says of all but optimizers, whose parameters are called by addresses.
std::string PartsOf(const std::string& file) {
  const Ended listed = RunTool("list " + file);
  EXPECT_EQ(listed.code, 0) << listed.output;
  std::istringstream lines(listed.output.substr(listed.output.find('\n') + 1));
  std::string parts;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("  optimizers/")) parts += line + "\n";
  }
  return parts;
}

template <class Optimizer>
class ConsolidateTest : public testing::Test {};
using Optimizers = testing::Types<Adam, SGD>;
TYPED_TEST_SUITE(ConsolidateTest, Optimizers);

TYPED_TEST(ConsolidateTest, WhatItWritesGoesOnToTheBitLikeTheShards) {
  const auto expected = TrainAtOnce<TypeParam>(6);
  for (const int ranks : {1, 2, 3}) {
    const ScratchFolder folder;
    const ScratchFolder other;
    const std::string file = folder.File("run.pt");
    const std::string plain = other.File("plain.pt");
    TrainAndSave<TypeParam>(file, ranks, /*sharded=*/true);
    // One rank alone has all of the state.
    ASSERT_EQ(ShardOf(file, ranks - 1) == "", ranks == 1);
    const Ended verified = RunTool("verify " + file);
    EXPECT_EQ(verified.code, 0) << verified.output;
    EXPECT_EQ(std::count(verified.output.begin(), verified.output.end(), '\n'),
              ranks == 1 ? 1 : ranks + 1);
    const Ended ended = RunTool("consolidate " + file + " " + plain);
    ASSERT_EQ(ended.code, 0) << ended.output;
    for (const auto& [readers, sharded] :
         std::vector<std::pair<int, bool>>{{1, false}, {2, true}, {3, false}}) {
      RunTorchRanks(readers, [&, sharded = sharded](int) {
        ToolRun<TypeParam> run(sharded);
        ToolRun<TypeParam> of_shards(sharded);
        run.best = 0;
        ASSERT_TRUE(load_checkpoint(plain, run.checkpoint()));
        ASSERT_TRUE(load_checkpoint(file, of_shards.checkpoint()));
        EXPECT_EQ(run.steps, 3);
        EXPECT_EQ(run.best, 0.25);
        run.TrainUntil(6);
        of_shards.TrainUntil(6);
        EXPECT_EQ(Distance(run.net.parameters(), of_shards.net.parameters()), 0);
        // An average of three equal numbers may be rounded.
        EXPECT_LT(Distance(run.net.parameters(), expected), 1e-12);
      });
    }
  }
}

TYPED_TEST(ConsolidateTest, WhatItWritesIsWhatAnUnshardedSaveIs) {
  const ScratchFolder folder;
  const std::string plain = folder.File("plain.pt");
  const std::string whole = folder.File("whole.pt");
  TrainAndSave<TypeParam>(folder.File("run.pt"), 2, /*sharded=*/true);
  TrainAndSave<TypeParam>(whole, 2, /*sharded=*/false);
  ASSERT_EQ(RunTool("consolidate " + folder.File("run.pt") + " " + plain).code, 0);
  EXPECT_EQ(PartsOf(plain), PartsOf(whole));
  // A program without Sirtaki reads both.
  const auto read = [](const std::string& file, MixedNet& net) {
    auto optimizer = std::make_unique<TypeParam>(
        ToolRun<TypeParam>::Groups(net), With(typename ToolRun<TypeParam>::Options(0.1), 0.1));
    torch::serialize::InputArchive archive;
    archive.load_from(file);
    for (const char* const key : {"optimizers", "0", "optimizer"}) {
      torch::serialize::InputArchive nested;
      archive.read(key, nested);
      archive = std::move(nested);
    }
    optimizer->load(archive);
    return optimizer;
  };
  MixedNet net;
  const auto of_plain = read(plain, net);
  const auto of_whole = read(whole, net);
  ASSERT_EQ(of_plain->state().size(), 6);
  using State = std::conditional_t<std::is_same_v<TypeParam, Adam>, torch::optim::AdamParamState,
                                   torch::optim::SGDParamState>;
  for (const auto& [key, state] : of_whole->state()) {
    ASSERT_NE(of_plain->state().at(key), nullptr);
    // LibTorch loses the state of a parameter that stands twice when it loads what it has saved.
    if (state == nullptr) continue;
    EXPECT_TRUE(static_cast<const State&>(*of_plain->state().at(key)) ==
                static_cast<const State&>(*state));
  }
}

TEST(CheckpointToolTest, ListNamesThePartsAndWhichFileHasWhat) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  TrainAndSave<Adam>(file, 2, /*sharded=*/true);
  const Ended listed = RunTool("list " + file);
  EXPECT_EQ(listed.code, 0);
  EXPECT_THAT(
      listed.output,
      AllOf(StartsWith(file + ": " + std::to_string(fs::file_size(file)) + " bytes\n"),
            HasSubstr("\n  format: 2\n"), HasSubstr("\n  ranks: 2\n"),
            HasSubstr(
                "\n  model_parameters \"model\" \"hidden.weight\": float64 [7, 5], 280 bytes\n"),
            HasSubstr("torch::optim::AdamOptions"), HasSubstr("options/lr: 0.02\n"),
            HasSubstr("options/lr: 0.05\n"), HasSubstr("\n  integers \"epoch\": 3\n"),
            HasSubstr("\n  objects/0/"), HasSubstr(ShardOf(file, 0) + ": "),
            HasSubstr(ShardOf(file, 1) + ": ")));
  // The cut ones, of which one does not lie row by row.
  EXPECT_THAT(listed.output, HasSubstr("parameter 0 of group 1, float64 [7, 5]: elements "));
  EXPECT_THAT(listed.output, HasSubstr("parameter 2 of group 1, float64 [5, 3, 2, 2]: elements "));
}

TEST(CheckpointToolTest, VerifyNamesWhatIsDamagedMissingOrForeign) {
  const ScratchFolder folder;
  const ScratchFolder kept;
  const std::string file = folder.File("run.pt");
  TrainAndSave<Adam>(file, 3, /*sharded=*/true);
  const std::string shard = ShardOf(file, 1);
  fs::copy_file(file, kept.File("index"));
  fs::copy_file(shard, kept.File("shard"));
  const auto restore = [&] {
    fs::copy_file(kept.File("index"), file, fs::copy_options::overwrite_existing);
    fs::copy_file(kept.File("shard"), shard, fs::copy_options::overwrite_existing);
  };
  const auto expect_bad = [&](const std::string& line) {
    for (const std::string& command :
         {"verify " + file, "consolidate " + file + " " + folder.File("out.pt")}) {
      const Ended ended = RunTool(command);
      EXPECT_EQ(ended.code, 1) << command << "\n" << ended.output;
      // verify has a line for each file.
      const std::string before = command.starts_with("verify") ? "" : "sirtaki-checkpoint: ";
      EXPECT_THAT("\n" + ended.output, HasSubstr("\n" + before + line)) << command;
    }
    EXPECT_FALSE(fs::exists(folder.File("out.pt")));
    EXPECT_TRUE(folder.FilesThatEnd(".tmp").empty());
    restore();
  };
  FlipByte(file, static_cast<std::int64_t>(fs::file_size(file)) / 2);
  expect_bad(file + ": is damaged");
  FlipByte(shard, 100);
  expect_bad(shard + ": is damaged");
  EXPECT_THAT(RunTool("verify " + file).output, Not(HasSubstr("damaged"))) << "restored";
  fs::resize_file(shard, fs::file_size(shard) - 50);
  expect_bad(shard + ": is ");
  fs::remove(shard);
  const Ended listed = RunTool("list " + file);
  EXPECT_EQ(listed.code, 1);
  EXPECT_THAT(listed.output, HasSubstr("sirtaki-checkpoint: " + shard + " is missing"));
  expect_bad(shard + " is missing");
  fs::remove(file);
  expect_bad(file + ": is missing");
  const ScratchFolder others;
  TrainAndSave<Adam>(others.File("run.pt"), 3, /*sharded=*/true);
  fs::copy_file(ShardOf(others.File("run.pt"), 1), shard, fs::copy_options::overwrite_existing);
  expect_bad(shard + " is of another save");
}

TEST(CheckpointToolTest, ShardsThatAreNotAllOfTheStateOnceAreRefused) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  TrainAndSave<SGD>(file, 2, /*sharded=*/true);
  // The same save, but another rank's.
  fs::copy_file(ShardOf(file, 0), ShardOf(file, 1), fs::copy_options::overwrite_existing);
  for (const std::string& command :
       {"verify " + file, "consolidate " + file + " " + folder.File("out.pt")}) {
    const Ended ended = RunTool(command);
    EXPECT_EQ(ended.code, 1) << command;
    EXPECT_THAT(ended.output, AllOf(HasSubstr(file + ": optimizer \"optimizer\": parameter "),
                                    HasSubstr(" shard")));
  }
  EXPECT_FALSE(fs::exists(folder.File("out.pt")));
}

// Versions before sirtaki-checkpoint did not save how a parameter lies in memory.
TEST(CheckpointToolTest, OlderShardsAreVerifiedAndLoadedButNotPutTogetherByGuessing) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  TrainAndSave<Adam>(file, 2, /*sharded=*/true);
  for (const int rank : {0, 1}) {
    torch::serialize::InputArchive archive;
    ASSERT_TRUE(detail::ReadCheckpointFile(ShardOf(file, rank), &archive));
    torch::serialize::InputArchive optimizers;
    torch::serialize::InputArchive saved;
    archive.read("optimizers", optimizers);
    optimizers.read("0", saved);
    torch::serialize::OutputArchive older;
    torch::serialize::OutputArchive all(older.compilation_unit());
    torch::serialize::OutputArchive one(older.compilation_unit());
    c10::IValue value;
    for (const std::string& key : saved.keys()) {
      saved.read(key, value);
      if (key != "strides") one.write(key, value);
    }
    all.write("0", one);
    archive.read("save", value);
    older.write("save", value);
    older.write("optimizers", all);
    detail::NewCheckpointFile(ShardOf(file, rank), older).Replace();
  }
  EXPECT_EQ(RunTool("verify " + file).code, 0);
  const Ended ended = RunTool("consolidate " + file + " " + folder.File("out.pt"));
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.output, AllOf(HasSubstr("float64 ["), HasSubstr("an earlier version")));
  const auto expected = TrainAtOnce<Adam>(5);
  RunTorchRanks(2, [&](int) {
    ToolRun<Adam> run(/*sharded=*/true);
    ASSERT_TRUE(load_checkpoint(file, run.checkpoint()));
    run.TrainUntil(5);
    EXPECT_EQ(Distance(run.net.parameters(), expected), 0);
  });
}

TEST(CheckpointToolTest, WhatIsThereIsReplacedOnlyByForce) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  const std::string out = folder.File("out.pt");
  TrainAndSave<SGD>(file, 1, /*sharded=*/true);
  std::ofstream(out) << "precious";
  for (const std::string flag : {"", " --python"}) {
    const Ended refused = RunTool("consolidate " + file + " " + out + flag);
    EXPECT_EQ(refused.code, 1);
    EXPECT_THAT(refused.output, HasSubstr(out + " is there already: --force replaces it"));
    EXPECT_EQ(fs::file_size(out), 8);
  }
  const std::string nowhere = folder.File("nowhere/out.pt");
  const Ended failed = RunTool("consolidate " + file + " " + nowhere);
  EXPECT_EQ(failed.code, 1);
  EXPECT_THAT(failed.output, StartsWith("sirtaki-checkpoint: " + nowhere + "."));
  EXPECT_THAT(failed.output, HasSubstr(".tmp: cannot be made"));
  EXPECT_EQ(RunTool("consolidate " + file + " " + out + " --force").code, 0);
  EXPECT_EQ(RunTool("verify " + out).code, 0);
}

struct OwnSave : SGD {
  using SGD::SGD;
  void save(torch::serialize::OutputArchive& archive) const override {
    torch::serialize::OutputArchive states(archive.compilation_unit());
    torch::serialize::OutputArchive state(archive.compilation_unit());
    state.write("mine", c10::IValue(std::int64_t{1}));
    states.write("1", state);
    archive.write("state", states);
  }
};

TEST(CheckpointToolTest, TwoPartsOfOneNameAndAnOptimizerThatPythonDoesNotHave) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  RunTorchRanks(1, [&](int) {
    SmallNet net;
    torch::optim::LBFGS lbfgs(net.parameters(), torch::optim::LBFGSOptions(0.1));
    SGD sgd(net.parameters(), SGDOptions(0.1));
    OwnSave own(net.parameters(), SGDOptions(0.1));
    torch::optim::StepLR scheduler(sgd, 2);
    save_checkpoint(file, Checkpoint()
                              .model(net, "a")
                              .optimizer(sgd, "a")
                              .optimizer(lbfgs, "b")
                              .optimizer(own, "c")
                              .scheduler(scheduler));
  });
  const Ended ended = RunTool("consolidate " + file + " " + folder.File("out.pt") + " --python");
  EXPECT_EQ(ended.code, 0);
  EXPECT_THAT(ended.output, AllOf(HasSubstr("optimizer \"b\" is left out"),
                                  HasSubstr("optimizer \"c\" is left out"),
                                  HasSubstr("scheduler \"scheduler\" is left out")));
  std::ifstream stream(folder.File("out.pt"), std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(stream)),
                                std::istreambuf_iterator<char>());
  const auto dict = torch::pickle_load(bytes).toGenericDict();
  EXPECT_TRUE(dict.contains("model a") && dict.contains("optimizer a"));
  EXPECT_EQ(dict.size(), 3);
}

TEST(CheckpointToolTest, ShardsOfAnOptimizerWithItsOwnSaveAreVerifiedOnly) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  RunTorchRanks(2, [&](int) {
    SmallNet net;
    auto optimizer = DistributedOptimizer(
        OwnSave(net.parameters(), SGDOptions(0.1).momentum(0.9)), net.named_parameters(),
        DistributedOptimizerOptions().shard(Shard::OptimizerState));
    Loss(net, BatchOfRank(0, 0)).backward();
    optimizer.step();
    save_checkpoint(file, Checkpoint().model(net).optimizer(optimizer));
  });
  EXPECT_EQ(RunTool("verify " + file).code, 0);
  EXPECT_EQ(RunTool("list " + file).code, 0);
  const Ended ended = RunTool("consolidate " + file + " " + folder.File("out.pt"));
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.output, HasSubstr(".shards."));
  EXPECT_THAT(ended.output, HasSubstr("only load_checkpoint() in its program can read it"));
  fs::copy_file(ShardOf(file, 0), ShardOf(file, 1), fs::copy_options::overwrite_existing);
  EXPECT_EQ(RunTool("verify " + file).code, 1);
}

TEST(CheckpointToolTest, ATypeThatPythonWouldNotReadIsNamed) {
  const ScratchFolder folder;
  const std::string file = folder.File("run.pt");
  RunTorchRanks(1, [&](int) {
    torch::Tensor small = torch::ones({2, 9}).to(torch::kFloat8_e4m3fn);
    save_checkpoint(file, Checkpoint().value("small", small));
  });
  EXPECT_EQ(RunTool("consolidate " + file + " " + folder.File("plain.pt")).code, 0);
  const Ended ended = RunTool("consolidate " + file + " " + folder.File("out.pt") + " --python");
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.output, HasSubstr("[2, 9] cannot be in a file for Python"));
  EXPECT_FALSE(fs::exists(folder.File("out.pt")));
  EXPECT_TRUE(folder.FilesThatEnd(".tmp").empty());
}

TEST(CheckpointToolTest, WrongUseIsSaid) {
  for (const auto& [arguments, text] : std::vector<std::pair<std::string, std::string>>{
           {"", "a command is missing"},
           {"check x", "there is no command \"check\""},
           {"list", "list takes PATH alone"},
           {"verify a b", "verify takes PATH alone"},
           {"verify a --force", "verify takes PATH alone"},
           {"consolidate a", "consolidate takes PATH and OUT"},
           {"consolidate a b --pyton", "there is no flag \"--pyton\""}}) {
    const Ended ended = RunTool(arguments);
    EXPECT_EQ(ended.code, 2) << arguments;
    EXPECT_THAT(ended.output,
                AllOf(StartsWith("sirtaki-checkpoint: " + text), HasSubstr("--help")));
  }
}

TEST(CheckpointToolTest, TheHelpIsThatOfTheGoldenFile) {
  const Ended ended = RunTool("--help");
  EXPECT_EQ(ended.code, 0);
  std::ifstream golden(SIRTAKI_SOURCE_DIR "/tests/torch/checkpoint/tool/help.txt");
  EXPECT_EQ(ended.output, std::string(std::istreambuf_iterator<char>(golden), {}));
}

}  // namespace
}  // namespace sirtaki::tests
