// The option autotune: what it finds is the same on all ranks, and changes no result.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

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
at::Tensor Train(int rank, const Session& session, int steps) {
  torch::nn::Linear model(3, 2);
  for (at::Tensor& parameter : model->parameters()) parameter.detach().fill_(0.3);
  DistributedOptimizer optimizer(torch::optim::SGD(model->parameters(), 0.1),
                                 model->named_parameters(), {}, session);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const at::Tensor input = torch::full({4, 3}, 0.01 * (step % 7) + rank);
    model->forward(input).pow(2).mean().backward();
    optimizer.step();
  }
  return model->weight.detach().clone();
}

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
      3, [&](int rank, const Session& session) { plain[rank] = Train(rank, session, kEnough); },
      config, {}, InprocWorld::Sharing::kDirect);
  config.autotune = true;
  config.autotune_log = log;
  RunTorchRanks(
      3,
      [&](int rank, const Session& session) {
        tuned[rank] = Train(rank, session, kEnough);
        limits[rank] = detail::StateOf(session)->session().limits();
      },
      config, {}, InprocWorld::Sharing::kDirect);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(limits[rank], limits[0]);
    EXPECT_TRUE(tuned[rank].equal(plain[rank])) << "shared memory reduces in one order";
  }
  EXPECT_THAT(TextOf(log), ::testing::StartsWith("option,from,to,from_ms,to_ms,accepted\n"));
  core::Config found;
  const core::Status status =
      core::ParseConfig({}, {}, {{"settings", log + ".settings"}}, &found, nullptr);
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(found.bucket_bytes, limits[0].bucket_bytes);
  EXPECT_EQ(found.chunk_bytes, limits[0].chunk_bytes);
  EXPECT_EQ(found.small_bytes, limits[0].small_bytes);
}

TEST(AutotuneTest, TheSearchGoesOnAfterAJoin) {
  core::Config config;
  config.autotune = true;
  std::vector<Limits> limits(2);
  RunTorchRanks(
      2,
      [&](int rank, const Session& session) {
        torch::nn::Linear model(3, 2);
        DistributedOptimizer optimizer(torch::optim::SGD(model->parameters(), 0.1),
                                       model->named_parameters(), {}, session);
        const auto train = [&](int steps) {
          for (int step = 0; step < steps; ++step) {
            optimizer.zero_grad();
            model->forward(torch::ones({4, 3})).mean().backward();
            optimizer.step();
          }
        };
        train(rank == 0 ? 23 : 60);
        EXPECT_EQ(join({}, session), 1);
        train(kEnough);
        limits[rank] = detail::StateOf(session)->session().limits();
      },
      config);
  EXPECT_EQ(limits[0], limits[1]);
}

}  // namespace
}  // namespace sirtaki
