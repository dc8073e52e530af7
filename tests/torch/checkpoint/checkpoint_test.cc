#include "sirtaki/checkpoint.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <functional>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "frameworks/torch/checkpoint/checkpoint_file.h"
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
namespace fs = std::filesystem;

constexpr std::int64_t kSamples = 26;

// A whole training run. Its dropout draws from a generator of its own: threads share LibTorch's.
struct TrainingRun {
  TrainingRun(std::uint64_t seed)
      : optimizer(DistributedOptimizer(
            torch::optim::Adam(net.parameters(), torch::optim::AdamOptions(0.05)),
            net.named_parameters())),
        scheduler(optimizer, 3, 0.5),
        sampler(kSamples, DistributedSamplerOptions().seed(seed)),
        dropout(at::detail::createCPUGenerator(seed * 10 + static_cast<std::uint64_t>(rank()))) {}

  Checkpoint checkpoint() {
    return Checkpoint()
        .model(net)
        .optimizer(optimizer)
        .scheduler(scheduler)
        .sampler(sampler)
        .epoch(epoch)
        .value("steps", steps)
        .generator("dropout", dropout);
  }

  void TrainUntil(std::int64_t until) {
    const auto x = Waves({kSamples, 5}, 1);
    const auto y = Waves({kSamples, 3}, 2);
    while (steps < until) {
      const auto batch = sampler.next(4);
      if (!batch) {
        sampler.set_epoch(static_cast<std::size_t>(++epoch));
        continue;
      }
      const auto rows = torch::tensor(std::vector<std::int64_t>(batch->begin(), batch->end()));
      const auto keep =
          torch::bernoulli(torch::full({rows.size(0), 5}, 0.7, torch::kDouble), dropout);
      optimizer.zero_grad();
      torch::mse_loss(net.forward(x.index_select(0, rows) * keep), y.index_select(0, rows))
          .backward();
      optimizer.step();
      scheduler.step();
      ++steps;
    }
  }

  // All that decides how it goes on, and that can be looked at.
  std::vector<torch::Tensor> State() const {
    std::vector<torch::Tensor> state;
    for (const auto& parameter : net.parameters()) state.push_back(parameter.detach().clone());
    for (const auto& parameter : net.parameters()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      const auto& adam = static_cast<const torch::optim::AdamParamState&>(*found->second);
      state.push_back(torch::tensor(adam.step()));
      state.push_back(adam.exp_avg().clone());
      state.push_back(adam.exp_avg_sq().clone());
    }
    const auto index = static_cast<std::int64_t>(sampler.epoch() * 1000 + sampler.position());
    state.push_back(torch::tensor(optimizer.param_groups()[0].options().get_lr(), torch::kDouble));
    state.push_back(torch::tensor(std::vector<std::int64_t>{index, epoch, steps}));
    state.push_back(dropout.get_state());
    return state;
  }

  SmallNet net;
  DistributedOptimizer<torch::optim::Adam> optimizer;
  torch::optim::StepLR scheduler;
  DistributedSampler sampler;
  at::Generator dropout;
  std::int64_t epoch = 0;
  std::int64_t steps = 0;
};

bool SameBits(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!torch::equal(a[i], b[i])) return false;
  }
  return true;
}

TEST(CheckpointTest, AResumedRunEqualsOneThatWasNotStopped) {
  for (const int size : {1, 2, 3}) {
    const ScratchFolder folder;
    RunTorchRanks(size, [&](int rank) {
      TrainingRun whole(7);
      whole.TrainUntil(40);
      {
        TrainingRun first(7);
        first.TrainUntil(17);  // in the middle of an epoch
        EXPECT_GT(first.sampler.position(), 0u);
        save_checkpoint(folder.File("run.pt"), first.checkpoint());
        first.TrainUntil(20);  // lost with the crash
      }
      TrainingRun resumed(99);
      {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : resumed.net.parameters()) parameter.fill_(rank + 0.5);
      }
      // Only rank 0 has the file.
      const std::string path = rank == 0 ? folder.File("run.pt") : folder.File("nowhere/run.pt");
      ASSERT_TRUE(load_checkpoint(path, resumed.checkpoint()));
      EXPECT_EQ(resumed.steps, 17);
      resumed.TrainUntil(40);
      EXPECT_TRUE(SameBits(resumed.State(), whole.State())) << "rank " << rank << " of " << size;
    });
  }
}

TEST(CheckpointTest, WithoutAFileNothingIsChanged) {
  const ScratchFolder folder;
  RunTorchRanks(2, [&](int) {
    TrainingRun run(1);
    run.TrainUntil(3);
    const auto before = run.State();
    EXPECT_FALSE(load_checkpoint(folder.File("none.pt"), run.checkpoint()));
    EXPECT_FALSE(load_checkpoint(folder.File("none/none.pt"), run.checkpoint()));
    EXPECT_TRUE(SameBits(run.State(), before));
  });
}

TEST(CheckpointTest, AnotherNumberOfRanksSeedsAnewAndAlwaysInTheSameWay) {
  const ScratchFolder folder;
  std::vector<torch::Tensor> saved;
  RunTorchRanks(2, [&](int rank) {
    TrainingRun run(7);
    run.TrainUntil(5);
    save_checkpoint(folder.File("run.pt"), run.checkpoint());
    if (rank == 0) saved = run.net.parameters();
  });
  std::vector<at::Tensor> states(3);
  for (int i = 0; i < 2; ++i) {
    RunTorchRanks(3, [&](int rank) {
      TrainingRun run(static_cast<std::uint64_t>(20 + i));
      EXPECT_TRUE(load_checkpoint(folder.File("run.pt"), run.checkpoint()));
      EXPECT_EQ(Distance(run.net.parameters(), saved), 0);
      EXPECT_EQ(run.steps, 5);
      // 5 steps of 4 samples on 2 ranks are more than the epoch of 26 has: the second epoch has
      // begun, with batch 1 of it done.
      EXPECT_EQ(run.sampler.epoch(), 1u);
      EXPECT_EQ(run.sampler.size(), 6u);  // ceil((26 - 2 * 4) / 3)
      at::Tensor& state = states[static_cast<std::size_t>(rank)];
      if (i == 0) state = run.dropout.get_state();
      EXPECT_TRUE(torch::equal(state, run.dropout.get_state())) << rank;
      run.TrainUntil(9);
    });
  }
  EXPECT_FALSE(torch::equal(states[0], states[1]));
  EXPECT_FALSE(torch::equal(states[1], states[2]));
}

// ---- its parts ----

TEST(CheckpointTest, ValuesOfAllKinds) {
  const ScratchFolder folder;
  const std::string path = folder.File("values.pt");
  RunTorchRanks(2, [&](int rank) {
    std::int64_t count = rank == 0 ? std::numeric_limits<std::int64_t>::min() : 1;
    double best = rank == 0 ? -std::numeric_limits<double>::infinity() : 1;
    double tenth = rank == 0 ? 0.1 : 0;
    std::string text = rank == 0 ? std::string("a\0b \"quoted\" \xc3\xa4\n", 15) : "";
    at::Tensor mean = rank == 0 ? torch::arange(6).reshape({2, 3}) : torch::zeros({1});
    const auto checkpoint = Checkpoint()
                                .value("count", count)
                                .value("best so far: \"%\"", best)
                                .value("tenth", tenth)
                                .value("text", text)
                                .value("mean", mean);
    save_checkpoint(path, checkpoint);
    count = 0;
    best = 0;
    tenth = 0;
    text = "x";
    mean = at::Tensor();
    EXPECT_TRUE(load_checkpoint(path, checkpoint));
    EXPECT_EQ(count, std::numeric_limits<std::int64_t>::min());
    EXPECT_EQ(best, -std::numeric_limits<double>::infinity());
    EXPECT_EQ(tenth, 0.1);
    EXPECT_EQ(text, std::string("a\0b \"quoted\" \xc3\xa4\n", 15));
    EXPECT_TRUE(mean.defined() && torch::equal(mean, torch::arange(6).reshape({2, 3})));
  });
}

TEST(CheckpointTest, BuffersTiedAndTransposedParameters) {
  struct Net : torch::nn::Module {
    explicit Net(double value) : norm(torch::nn::BatchNorm1dOptions(3)), plain(2, 2) {
      register_module("norm", norm);
      register_module("plain", plain);
      register_module("tied", plain);
      flipped = register_parameter("flipped", torch::full({2, 3}, value).t());
      const torch::NoGradGuard no_grad;
      norm->running_mean.fill_(value);
      plain->weight.fill_(value);
    }
    torch::nn::BatchNorm1d norm;
    torch::nn::Linear plain;
    torch::Tensor flipped;
  };
  const ScratchFolder folder;
  RunTorchRanks(2, [&](int rank) {
    Net saved(rank == 0 ? 4 : 5);
    save_checkpoint(folder.File("net.pt"), Checkpoint().model(saved, "net"));
    Net net(9);
    EXPECT_TRUE(load_checkpoint(folder.File("net.pt"), Checkpoint().model(net, "net")));
    EXPECT_TRUE(torch::equal(net.norm->running_mean, torch::full({3}, 4.0f)));
    EXPECT_TRUE(torch::equal(net.flipped, torch::full({3, 2}, 4.0f)));
    EXPECT_TRUE(torch::equal(net.plain->weight, torch::full({2, 2}, 4.0f)));
    EXPECT_TRUE(net.flipped.requires_grad() && net.flipped.is_leaf());
  });
}

TEST(CheckpointTest, SeveralModelsAndOptimizers) {
  const ScratchFolder folder;
  RunTorchRanks(2, [&](int) {
    const auto filled = [](double value) {
      auto net = std::make_shared<SmallNet>();
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.fill_(value);
      return net;
    };
    const auto make = [](SmallNet& net, double lr) {
      return torch::optim::SGD(net.parameters(), torch::optim::SGDOptions(lr));
    };
    const auto a = filled(1);
    const auto b = filled(2);
    auto sgd_a = make(*a, 0.1);
    auto sgd_b = make(*b, 0.2);
    save_checkpoint(
        folder.File("gan.pt"),
        Checkpoint().model(*a, "a").model(*b, "b").optimizer(sgd_a, "a").optimizer(sgd_b, "b"));
    const auto c = filled(0);
    auto sgd_c = make(*c, 0);
    EXPECT_TRUE(
        load_checkpoint(folder.File("gan.pt"), Checkpoint().model(*c, "b").optimizer(sgd_c, "b")));
    EXPECT_EQ(Distance(c->parameters(), b->parameters()), 0);
    EXPECT_EQ(sgd_c.param_groups()[0].options().get_lr(), 0.2);
  });
}

template <class MakeOptimizer>
void ExpectOptimizerGoesOn(const MakeOptimizer& make_optimizer) {
  const ScratchFolder folder;
  RunTorchRanks(2, [&](int rank) {
    const auto train = [](SmallNet& net, auto& optimizer, int from, int to) {
      for (int step = from; step < to; ++step) {
        const auto closure = [&] {
          optimizer.zero_grad();
          const auto loss = Loss(net, BatchOfRank(step, 0));
          loss.backward();
          return loss;
        };
        optimizer.step(closure);
      }
    };
    SmallNet whole;
    auto optimizer = make_optimizer(whole.parameters());
    train(whole, optimizer, 0, 3);
    save_checkpoint(folder.File("run.pt"), Checkpoint().model(whole).optimizer(optimizer));
    train(whole, optimizer, 3, 6);

    SmallNet net;
    auto resumed = make_optimizer(net.parameters());
    if (rank == 1) train(net, resumed, 8, 9);  // state that must go
    EXPECT_TRUE(load_checkpoint(folder.File("run.pt"), Checkpoint().model(net).optimizer(resumed)));
    train(net, resumed, 3, 6);
    EXPECT_EQ(Distance(net.parameters(), whole.parameters()), 0) << rank;
  });
}

TEST(CheckpointTest, AllOptimizersOfLibTorch) {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace)
  using Parameters = std::vector<torch::Tensor>;
  ExpectOptimizerGoesOn([](Parameters p) { return SGD(p, SGDOptions(0.1).momentum(0.9)); });
  ExpectOptimizerGoesOn([](Parameters p) { return Adam(p, AdamOptions(0.1).amsgrad(true)); });
  ExpectOptimizerGoesOn([](Parameters p) { return AdamW(p, AdamWOptions(0.1)); });
  ExpectOptimizerGoesOn(
      [](Parameters p) { return RMSprop(p, RMSpropOptions(0.1).momentum(0.5).centered(true)); });
  ExpectOptimizerGoesOn([](Parameters p) { return Adagrad(p, AdagradOptions(0.1)); });
  ExpectOptimizerGoesOn([](Parameters p) { return LBFGS(p, LBFGSOptions(0.1).max_iter(3)); });
}

TEST(CheckpointTest, APlateauSchedulerGoesOn) {
  const ScratchFolder folder;
  RunTorchRanks(2, [&](int) {
    using torch::optim::ReduceLROnPlateauScheduler;
    const auto make_sgd = [] {
      return torch::optim::SGD({torch::zeros({1}, torch::requires_grad())},
                               torch::optim::SGDOptions(1.0));
    };
    const auto make_scheduler = [](torch::optim::SGD& sgd) {
      return ReduceLROnPlateauScheduler(sgd, ReduceLROnPlateauScheduler::min, 0.5f, 2, 1e-4,
                                        ReduceLROnPlateauScheduler::rel, 2);
    };
    // It lowers the rate after 3 bad ones, waits for 2, and begins to count again.
    const std::vector<float> metrics = {3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 2, 2, 2, 2};
    for (std::size_t stop = 0; stop < metrics.size(); ++stop) {
      auto whole_sgd = make_sgd();
      auto whole = make_scheduler(whole_sgd);
      auto sgd = make_sgd();
      auto resumed = make_scheduler(sgd);
      for (std::size_t i = 0; i < metrics.size(); ++i) {
        if (i == stop) {
          save_checkpoint(folder.File("run.pt"),
                          Checkpoint().optimizer(whole_sgd).scheduler(whole));
          EXPECT_TRUE(load_checkpoint(folder.File("run.pt"),
                                      Checkpoint().optimizer(sgd).scheduler(resumed)));
        }
        whole.step(metrics[i]);
        if (i >= stop) {
          resumed.step(metrics[i]);
          EXPECT_EQ(sgd.param_groups()[0].options().get_lr(),
                    whole_sgd.param_groups()[0].options().get_lr())
              << "stopped before " << stop << ", at " << i;
        }
      }
      EXPECT_LT(whole_sgd.param_groups()[0].options().get_lr(), 0.3);
    }
  });
}

// By the loader behind Python's torch.jit.load.
TEST(CheckpointTest, TheFileIsAnArchiveOfTorchScript) {
  const ScratchFolder folder;
  const std::string path = folder.File("run.pt");
  RunTorchRanks(2, [&](int) {
    TrainingRun run(7);
    save_checkpoint(path, run.checkpoint());
  });
  const auto script = torch::jit::load(path);
  EXPECT_EQ(script.attr("format").toInt(), 1);
  EXPECT_EQ(script.attr("ranks").toInt(), 2);
  const auto models = script.attr("model_parameters").toGenericDict();
  const auto tensors = models.at("model").toGenericDict();
  EXPECT_EQ(Distance({tensors.at("hidden.weight").toTensor()}, {SmallNet().hidden->weight}), 0);
}

// ---- saving fails ----

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream contents;
  contents << file.rdbuf();
  return std::move(contents).str();
}

TEST(CheckpointTest, AFileThatCannotBeWrittenIsNamedOnAllRanks) {
  const ScratchFolder folder;
  std::ofstream(folder.File("file")) << "x";
  fs::create_directory(folder.File("folder"));
  RunTorchRanks(2, [&](int) {
    std::int64_t epoch = 0;
    const auto save_to = [&](const std::string& name) {
      const std::string path = folder.File(name);
      const auto text = ErrorOf(ErrorCode::InvalidArgument,
                                [&] { save_checkpoint(path, Checkpoint().epoch(epoch)); });
      EXPECT_THAT(text, AllOf(HasSubstr(path), HasSubstr("(on rank 0)")));
      return text;
    };
    EXPECT_THAT(save_to("missing/run.pt"), HasSubstr("cannot be made: No such file or directory"));
    EXPECT_THAT(save_to("file/run.pt"), HasSubstr("cannot be made: Not a directory"));
    EXPECT_THAT(save_to("folder"), HasSubstr("cannot be replaced: Is a directory"));
  });
  EXPECT_THAT(folder.FilesThatEnd(".tmp"), testing::IsEmpty());
}

// A limit on the size of files stands for a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &before_), 0);
    const rlimit lower = {bytes, before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &lower), 0);
  }
  ~FileSizeLimit() {
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &before_), 0);
    (void)std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST(CheckpointTest, AFullDiskLeavesTheOldFile) {
  const ScratchFolder folder;
  const std::string path = folder.File("run.pt");
  at::Tensor tensor = torch::ones({100});
  const auto checkpoint = Checkpoint().value("tensor", tensor);
  RunTorchRanks(2, [&](int) { save_checkpoint(path, checkpoint); });
  tensor = torch::zeros({1 << 20});
  {
    const FileSizeLimit limit(2 << 20);
    RunTorchRanks(2, [&](int) {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { save_checkpoint(path, checkpoint); }),
                  AllOf(HasSubstr(path), HasSubstr("cannot be written: File too large")));
    });
  }
  EXPECT_THAT(folder.FilesThatEnd(".tmp"), testing::IsEmpty());
  RunTorchRanks(1, [&](int) {
    at::Tensor loaded;
    EXPECT_TRUE(load_checkpoint(path, Checkpoint().value("tensor", loaded)));
    EXPECT_TRUE(torch::equal(loaded, torch::ones({100})));
  });
}

TEST(CheckpointTest, WhatACrashHasLeftBehindIsRemoved) {
  const ScratchFolder folder;
  // The program's own, and one of another checkpoint.
  const std::vector<std::string> others = {"other.pt.0123456789abcdef.tmp",
                                           "run.pt.notes-of-monday.tmp", "run.pt.tmp"};
  for (const std::string& name : others) std::ofstream(folder.File(name)) << "x";
  std::ofstream(folder.File("run.pt.0123456789abcdef.tmp")) << "half a checkpoint";
  RunTorchRanks(2, [&](int) {
    std::int64_t epoch = 5;
    save_checkpoint(folder.File("run.pt"), Checkpoint().epoch(epoch));
    epoch = 0;
    EXPECT_TRUE(load_checkpoint(folder.File("run.pt"), Checkpoint().epoch(epoch)));
    EXPECT_EQ(epoch, 5);
  });
  EXPECT_EQ(folder.FilesThatEnd(".tmp"), others);
}

// A disk that hung may wake at any time: before the next save is there, or when it is.
TEST(CheckpointFileTest, ASaveThatWasLeftBehindLeavesTheNextOneAlone) {
  const ScratchFolder folder;
  const std::string path = folder.File("run.pt");
  const auto writes = [](std::string text) {
    return [text = std::move(text)](const detail::NewCheckpointFile::Sink& sink) {
      sink(text.data(), text.size());
    };
  };
  auto old = std::make_unique<detail::NewCheckpointFile>(path, writes("old"));
  old->Sync();
  auto late = std::make_unique<detail::NewCheckpointFile>(path, writes("late"));
  detail::NewCheckpointFile next(path, [&](const auto& sink) {
    EXPECT_THROW(old->Replace(), std::runtime_error) << "while the next one is written";
    writes("new")(sink);
  });
  EXPECT_FALSE(fs::exists(path));
  old.reset();
  next.Replace();
  EXPECT_THROW(late->Replace(), std::runtime_error);
  late.reset();
  EXPECT_EQ(Contents(path).substr(0, 3), "new");
  EXPECT_THAT(folder.FilesThatEnd(".tmp"), testing::IsEmpty());
}

struct Stubborn {
  void save(torch::serialize::OutputArchive& archive) const {
    if (!saves) throw std::runtime_error("will not be saved");
    archive.write("x", c10::IValue(1));
  }
  void load(torch::serialize::InputArchive&) {
    ++loads;
    if (!loads_well) throw std::runtime_error("will not be loaded");
  }
  bool saves = true;
  bool loads_well = true;
  int loads = 0;
};

TEST(CheckpointTest, APartThatCannotBeSavedIsNamed) {
  const ScratchFolder folder;
  RunTorchRanks(2, [&](int rank) {
    Stubborn object;
    object.saves = rank != 0;
    EXPECT_THAT(
        ErrorOf(
            ErrorCode::InvalidArgument,
            [&] { save_checkpoint(folder.File("run.pt"), Checkpoint().object("scaler", object)); }),
        HasSubstr("object \"scaler\": will not be saved"));
    at::Tensor undefined;
    EXPECT_THAT(
        ErrorOf(
            ErrorCode::InvalidArgument,
            [&] { save_checkpoint(folder.File("run.pt"), Checkpoint().value("mean", undefined)); }),
        HasSubstr("the tensor \"mean\" is undefined"));
  });
  EXPECT_FALSE(fs::exists(folder.File("run.pt")));
}

TEST(CheckpointTest, PartsThatDifferBetweenRanksAreRefused) {
  const ScratchFolder folder;
  RunTorchRanks(2, [&](int rank) {
    std::int64_t epoch = 0;
    double lr = 0;
    const auto checkpoint =
        rank == 0 ? Checkpoint().epoch(epoch) : Checkpoint().epoch(epoch).value("lr", lr);
    for (const bool save : {true, false}) {
      EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                          [&] {
                            if (save) return save_checkpoint(folder.File("x"), checkpoint);
                            (void)load_checkpoint(folder.File("x"), checkpoint);
                          }),
                  AllOf(HasSubstr("nothing more on rank 0"), HasSubstr("number \"lr\" on rank 1")));
    }
  });
  EXPECT_FALSE(fs::exists(folder.File("x")));
}

TEST(CheckpointTest, NamesThatStandTwiceAreRefused) {
  RunTorchRanks(1, [&](int) {
    std::int64_t a = 0;
    double b = 0;
    SmallNet net;
    const auto text_of = [&](const Checkpoint& checkpoint) {
      return ErrorOf(ErrorCode::InvalidArgument, [&] { save_checkpoint("x", checkpoint); });
    };
    EXPECT_THAT(text_of(Checkpoint().value("a", a).value("a", b)),
                HasSubstr("two values are called \"a\""));
    EXPECT_THAT(text_of(Checkpoint().model(net).model(net)),
                HasSubstr("two models are called \"model\""));
    EXPECT_THAT(text_of(Checkpoint().generator("default", at::detail::createCPUGenerator())),
                HasSubstr("two generators are called \"default\""));
    EXPECT_THAT(text_of(Checkpoint().generator("g", at::Generator())),
                HasSubstr("the generator \"g\" is undefined"));
  });
}

// ---- loading fails: on every rank, with nothing changed ----

void ExpectRefused(const std::string& path, const std::string& text,
                   const std::function<void(TrainingRun&)>& prepare = {},
                   const std::function<Checkpoint(TrainingRun&)>& checkpoint_of = {}) {
  RunTorchRanks(2, [&](int) {
    TrainingRun run(50);
    run.TrainUntil(9);
    if (prepare) prepare(run);
    const auto before = run.State();
    const auto checkpoint = checkpoint_of ? checkpoint_of(run) : run.checkpoint();
    const auto found =
        ErrorOf(ErrorCode::InvalidArgument, [&] { (void)load_checkpoint(path, checkpoint); });
    EXPECT_THAT(found, AllOf(HasSubstr(path), HasSubstr(text), HasSubstr("(on rank 0)")));
    EXPECT_TRUE(SameBits(run.State(), before)) << text;
  });
}

void SaveRun(const std::string& path) {
  RunTorchRanks(2, [&](int) {
    TrainingRun run(7);
    run.TrainUntil(5);
    save_checkpoint(path, run.checkpoint());
  });
}

void Write(const std::string& path, const std::string& contents) {
  std::ofstream(path, std::ios::binary) << contents;
}

TEST(CheckpointTest, DamagedFilesAreRefused) {
  const ScratchFolder folder;
  SaveRun(folder.File("good.pt"));
  const std::string good = Contents(folder.File("good.pt"));
  ASSERT_GT(good.size(), 1000u);
  const std::string path = folder.File("bad.pt");
  const std::string no_checkpoint = "is cut off, or is not a checkpoint of Sirtaki";
  for (const std::string& bytes :
       {std::string(), std::string(5000, 'z'), good.substr(0, 10), good.substr(0, good.size() / 2),
        good.substr(0, good.size() - 1)}) {
    Write(path, bytes);
    ExpectRefused(path, no_checkpoint);
  }
  // A piece is missing in the middle.
  Write(path, good.substr(0, 500) + good.substr(600));
  ExpectRefused(path, "is damaged: its checksum does not match its contents");
  fs::remove(path);
  fs::create_directory(path);
  ExpectRefused(path, "is not a file");
}

TEST(CheckpointTest, AnyFlippedByteIsFound) {
  const ScratchFolder folder;
  SaveRun(folder.File("good.pt"));
  const std::string good = Contents(folder.File("good.pt"));
  const std::string path = folder.File("bad.pt");
  for (std::size_t at = 0; at < good.size(); at += 97) {
    std::string bytes = good;
    bytes[at] = static_cast<char>(bytes[at] ^ 4);
    Write(path, bytes);
    torch::serialize::InputArchive archive;
    EXPECT_THROW(detail::ReadCheckpointFile(path, &archive), std::runtime_error) << at;
  }
}

// What was read since may be what a collective that was broken off has left.
TEST(CheckpointTest, AFaultWhileItIsWrittenLeavesTheOldFile) {
  const ScratchFolder folder;
  const std::string path = folder.File("run.pt");
  RunTorchRanks(2, [&](int rank) {
    std::int64_t epoch = 1;
    save_checkpoint(path, Checkpoint().epoch(epoch));
    const std::string before = Contents(path);
    // A call that only one rank makes, until its time-out is everybody's fault.
    struct Faulty {
      void save(torch::serialize::OutputArchive&) const {
        EXPECT_THROW(allreduce(torch::ones({1}), AllreduceOptions().name("alone").timeout(
                                                     std::chrono::milliseconds(20))),
                     Error);
      }
      void load(torch::serialize::InputArchive&) {}
    };
    Faulty faulty;
    epoch = 2;
    const auto checkpoint = Checkpoint().epoch(epoch).object("faulty", faulty);
    EXPECT_THAT(ErrorOf(ErrorCode::TimedOut, [&] { save_checkpoint(path, checkpoint); }),
                HasSubstr("alone"));
    if (rank != 0) return;
    EXPECT_EQ(Contents(path), before);
    EXPECT_THAT(folder.FilesThatEnd(".tmp"), testing::IsEmpty());
  });
}

TEST(CheckpointTest, ANewerFormatIsRefused) {
  const ScratchFolder folder;
  torch::serialize::OutputArchive archive;
  archive.write("format", c10::IValue(3));
  detail::NewCheckpointFile(folder.File("new.pt"), archive).Replace();
  ExpectRefused(folder.File("new.pt"), "it has format 3, of a newer version of the library");
  torch::serialize::OutputArchive other;
  other.write("x", c10::IValue(2));
  detail::NewCheckpointFile(folder.File("other.pt"), other).Replace();
  ExpectRefused(folder.File("other.pt"), "it has no format");
}

TEST(CheckpointTest, AnotherModelIsRefused) {
  const ScratchFolder folder;
  const std::string path = folder.File("run.pt");
  SaveRun(path);
  const auto refused = [&](const std::shared_ptr<torch::nn::Module>& model,
                           const std::string& text) {
    ExpectRefused(path, text, {}, [&](TrainingRun& run) {
      return Checkpoint().epoch(run.epoch).optimizer(run.optimizer).model(*model);
    });
  };
  struct Two : torch::nn::Module {
    Two(std::int64_t outputs, torch::Dtype type, bool bias = true)
        : hidden(5, 7), output(torch::nn::LinearOptions(7, outputs).bias(bias)) {
      register_module("hidden", hidden);
      register_module("output", output);
      to(type);
    }
    torch::nn::Linear hidden;
    torch::nn::Linear output;
  };
  refused(std::make_shared<Two>(4, torch::kDouble),
          "model \"model\": parameter \"output.weight\" is float64 [3, 7] in the file and float64 "
          "[4, 7] here");
  refused(std::make_shared<Two>(3, torch::kFloat),
          "parameter \"hidden.weight\" is float64 [7, 5] in the file and float32 [7, 5] here");
  refused(std::make_shared<Two>(3, torch::kDouble, false),
          "the file has a parameter \"output.bias\", which the model does not have");
  auto more = std::make_shared<Two>(3, torch::kDouble);
  more->register_parameter("scale", torch::ones({1}));
  refused(more, "parameter \"scale\" is not in the file");
  auto counting = std::make_shared<Two>(3, torch::kDouble);
  counting->register_buffer("steps", torch::ones({1}));
  refused(counting, "buffer \"steps\" is not in the file");
}

TEST(CheckpointTest, AnotherOptimizerIsRefused) {
  const ScratchFolder folder;
  const std::string path = folder.File("run.pt");
  SaveRun(path);
  SmallNet net;
  torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.1));
  ExpectRefused(
      path,
      "optimizer \"optimizer\": group 0 with torch::optim::AdamOptions in the file, group 0 with "
      "torch::optim::SGDOptions here",
      {}, [&](TrainingRun& run) { return Checkpoint().model(run.net).optimizer(sgd); });
  torch::optim::Adam fewer({net.parameters()[0]}, torch::optim::AdamOptions(0.1));
  ExpectRefused(path,
                "optimizer \"optimizer\": parameter 1 of group 0, float64 [7] in the file, "
                "nothing more here",
                {}, [&](TrainingRun&) { return Checkpoint().optimizer(fewer); });
}

TEST(CheckpointTest, APartThatTheFileLacksIsNamed) {
  const ScratchFolder folder;
  const std::string path = folder.File("run.pt");
  SaveRun(path);
  const auto lacks = [&](const std::string& text,
                         const std::function<void(TrainingRun&, Checkpoint&)>& add) {
    ExpectRefused(path, text, {}, [&](TrainingRun& run) {
      Checkpoint checkpoint = run.checkpoint();
      add(run, checkpoint);
      return checkpoint;
    });
  };
  double number = 0;
  Stubborn object;
  lacks("it has no model \"teacher\"",
        [](TrainingRun& run, Checkpoint& it) { it.model(run.net, "teacher"); });
  lacks("it has no optimizer \"second\"",
        [](TrainingRun& run, Checkpoint& it) { it.optimizer(run.optimizer, "second"); });
  lacks("it has no scheduler \"second\"",
        [](TrainingRun& run, Checkpoint& it) { it.scheduler(run.scheduler, "second"); });
  lacks("it has no number \"best\"",
        [&](TrainingRun&, Checkpoint& it) { it.value("best", number); });
  lacks("it has no object \"scaler\"",
        [&](TrainingRun&, Checkpoint& it) { it.object("scaler", object); });
  lacks("it has no generator \"noise\"", [&](TrainingRun&, Checkpoint& it) {
    it.generator("noise", at::detail::createCPUGenerator());
  });
  ExpectRefused(path, "scheduler \"scheduler\" is of another kind: it has no \"best\"", {},
                [](TrainingRun& run) {
                  static torch::optim::ReduceLROnPlateauScheduler plateau(run.optimizer);
                  return Checkpoint().model(run.net).scheduler(plateau);
                });
}

TEST(CheckpointTest, AnObjectThatRefusesTakesAllBack) {
  const ScratchFolder folder;
  const std::string path = folder.File("run.pt");
  RunTorchRanks(3, [&](int rank) {
    TrainingRun run(7);
    Stubborn object;
    run.TrainUntil(5);
    save_checkpoint(path, run.checkpoint().object("last", object));
    run.TrainUntil(8);
    const auto before = run.State();
    // On the one that reads the file, and on another one.
    for (const int refuses : {0, 2}) {
      object.loads_well = rank != refuses;
      EXPECT_THAT(
          ErrorOf(ErrorCode::InvalidArgument,
                  [&] { (void)load_checkpoint(path, run.checkpoint().object("last", object)); }),
          AllOf(HasSubstr("object \"last\": will not be loaded"),
                HasSubstr("(on rank " + std::to_string(refuses) + ")")));
      EXPECT_TRUE(SameBits(run.State(), before)) << refuses;
    }
  });
}

}  // namespace
}  // namespace sirtaki::tests
