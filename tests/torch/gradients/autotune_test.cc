// The option autotune: what it finds is the same on all ranks, and changes no result.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "core/base/log.h"
#include "frameworks/torch/session/session_state.h"
#include "sirtaki/torch.h"
#include "tests/torch/checkpoint/scratch_folder.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki {
namespace {

using session::InprocWorld;
using Limits = session::Session::Limits;
using tests::RunTorchRanks;

std::string TextOf(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// Trains until the search must be over; the weights.
at::Tensor Train(int rank, int steps) {
  torch::nn::Linear model(3, 2);
  for (at::Tensor& parameter : model->parameters()) parameter.detach().fill_(0.3);
  DistributedOptimizer optimizer(torch::optim::SGD(model->parameters(), 0.1),
                                 model->named_parameters());
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const at::Tensor input = torch::full({4, 3}, 0.01 * (step % 7) + rank);
    model->forward(input).pow(2).mean().backward();
    optimizer.step();
  }
  return model->weight.detach().clone();
}

// The lines of the log that tell of the autotuner, while this lives.
class Told {
 public:
  Told() {
    core::SetLogSink([this](core::LogLevel level, const std::string& line) {
      if (line.find("autotune") == std::string::npos) return;
      EXPECT_EQ(level, core::LogLevel::kInfo);
      text_ += line + "\n";
    });
  }
  ~Told() { core::SetLogSink(nullptr); }
  Told(const Told&) = delete;
  Told& operator=(const Told&) = delete;
  std::string text() const { return text_; }

 private:
  std::string text_;
};

// 40 trials of 4 turns of 6 steps, and the warm-up.
constexpr int kEnough = 40 * 24 + 20;

TEST(AutotuneTest, AllRanksEndWithTheSameLimitsAndTheResultsAreThose) {
  const tests::ScratchFolder folder;
  const std::string log = folder.File("tuned.csv");
  std::vector<Limits> limits(3);
  std::vector<at::Tensor> tuned(3);
  std::vector<at::Tensor> plain(3);
  core::Config config;
  RunTorchRanks(
      3, [&](int rank) { plain[rank] = Train(rank, kEnough); }, config, {},
      InprocWorld::Sharing::kDirect);
  config.autotune = true;
  config.autotune_log = log;
  const Told told;
  RunTorchRanks(
      3,
      [&](int rank) {
        tuned[rank] = Train(rank, kEnough);
        limits[rank] = detail::CurrentSession()->session().limits();
      },
      config, {}, InprocWorld::Sharing::kDirect);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(limits[rank], limits[0]);
    EXPECT_TRUE(tuned[rank].equal(plain[rank])) << "shared memory reduces in one order";
  }
  // Once, by rank 0. Whether anything was better is the machine's to say.
  EXPECT_THAT(told.text(),
              ::testing::MatchesRegex(".*autotune: step [0-9.e-]+ (-> [0-9.e-]+ ms; used from now "
                                      "on:|ms; nothing tried was better than what was set:) "
                                      "--sirtaki-bucket-bytes=.* --sirtaki-fusion-delay=.*"
                                      " \\(after [0-9]+ trials\\)\n"));
  EXPECT_THAT(TextOf(log), ::testing::StartsWith("option,from,to,from_ms,to_ms,accepted\n"));
  core::Config found;
  const core::Status status =
      core::ParseConfig({}, {}, {{"settings", log + ".settings"}}, &found, nullptr);
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(found.bucket_bytes, limits[0].bucket_bytes);
  EXPECT_EQ(found.chunk_bytes, limits[0].chunk_bytes);
  EXPECT_EQ(found.small_bytes, limits[0].small_bytes);
}

TEST(AutotuneTest, ASearchThatCannotEndOrBeginSaysWhy) {
  core::Config config;
  config.autotune = true;
  const auto told_of = [&](int ranks, int steps) {
    const Told told;
    RunTorchRanks(
        ranks, [&](int rank) { Train(rank, steps); }, config);
    return told.text();
  };
  EXPECT_THAT(
      told_of(2, 40),
      ::testing::EndsWith(
          "autotune ended early, after 40 steps, 1 trial: the optimizer whose steps "
          "it measures, the first of the job, made its last step before the search was over. "
          "Train for more steps, 966 at most\n"));
  {
    const Told told;
    RunTorchRanks(
        2,
        [](int) {
          torch::nn::Linear net(1, 1);
          const DistributedOptimizer optimizer(
              torch::optim::SGD(net->parameters(), 0.1), net->named_parameters(),
              DistributedOptimizerOptions().process_set(add_process_set({0, 1})));
        },
        config);
    EXPECT_THAT(told.text(),
                ::testing::EndsWith("averages over a process set, even one of all ranks\n"));
  }
  EXPECT_THAT(told_of(1, 2),
              ::testing::EndsWith("autotune is off: a job of one rank reduces no gradients\n"));
  config.deterministic = true;
  EXPECT_THAT(told_of(2, 2),
              ::testing::EndsWith("autotune is off: with the option deterministic sizes must not "
                                  "depend on measured times\n"));
}

// A script's own optimizer in Python lives until the process exits, and so for longer than the session.
TEST(AutotuneTest, ASearchWhoseOptimizerOutlivesTheSessionSaysOnceThatItEndedEarly) {
  core::Config config;
  config.autotune = true;
  std::vector<std::shared_ptr<void>> alive(2);
  const Told told;
  RunTorchRanks(
      2,
      [&](int rank) {
        torch::nn::Linear model(3, 2);
        const auto optimizer = std::make_shared<DistributedOptimizer<torch::optim::SGD>>(
            torch::optim::SGD(model->parameters(), 0.1), model->named_parameters(),
            DistributedOptimizerOptions());
        optimizer->zero_grad();
        model->forward(torch::ones({4, 3})).mean().backward();
        optimizer->step();
        alive[static_cast<std::size_t>(rank)] = optimizer;
        detail::CurrentSession()->session().ShutdownAndLog("the test ends it");
      },
      config);
  const std::string before = told.text();
  EXPECT_THAT(before, ::testing::HasSubstr("autotune ended early, after 1 step, "));
  alive.clear();
  EXPECT_EQ(told.text(), before);
}

TEST(AutotuneTest, TheSearchGoesOnAfterAJoin) {
  core::Config config;
  config.autotune = true;
  std::vector<Limits> limits(2);
  RunTorchRanks(
      2,
      [&](int rank) {
        torch::nn::Linear model(3, 2);
        DistributedOptimizer optimizer(torch::optim::SGD(model->parameters(), 0.1),
                                       model->named_parameters());
        const auto train = [&](int steps) {
          for (int step = 0; step < steps; ++step) {
            optimizer.zero_grad();
            model->forward(torch::ones({4, 3})).mean().backward();
            optimizer.step();
          }
        };
        train(rank == 0 ? 23 : 60);
        EXPECT_EQ(join(), 1);
        train(kEnough);
        limits[rank] = detail::CurrentSession()->session().limits();
      },
      config);
  EXPECT_EQ(limits[0], limits[1]);
}

}  // namespace
}  // namespace sirtaki
