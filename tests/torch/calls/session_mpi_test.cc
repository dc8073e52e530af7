// RANKS: 1 2 3
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/machine/cores.h"
#include "tests/support/mpi_main.h"

namespace sirtaki::tests {
namespace {

using testing::HasSubstr;

std::string ErrorOf(ErrorCode code, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_STREQ(error_code_name(error.code()), error_code_name(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown; expected: " << error_code_name(code);
  return {};
}

AllreduceOptions Sum(const std::string& name = "") {
  return AllreduceOptions().name(name).op(ReduceOp::Sum);
}

TEST(InitTest, BeforeItEveryCallSaysSo) {
  EXPECT_FALSE(is_initialized());
  EXPECT_THAT(ErrorOf(ErrorCode::NotInitialized, [] { rank(); }), HasSubstr("init()"));
  ErrorOf(ErrorCode::NotInitialized, [] { allreduce(torch::ones({1})); });
  shutdown();
}

TEST(InitTest, KnowsTheRanksOfMpi) {
  init();
  EXPECT_TRUE(is_initialized());
  EXPECT_EQ(rank(), WorldRank());
  EXPECT_EQ(size(), WorldSize());
  EXPECT_EQ(local_rank(), WorldRank());
  EXPECT_EQ(local_size(), WorldSize());
  EXPECT_EQ(cross_rank(), 0);
  EXPECT_EQ(cross_size(), 1);
  EXPECT_TRUE(is_homogeneous());
  shutdown();
  EXPECT_FALSE(is_initialized());
}

TEST(InitTest, AfterShutdownEveryCallSaysSo) {
  EXPECT_THAT(ErrorOf(ErrorCode::NotInitialized, [] { size(); }), HasSubstr("shutdown()"));
  ErrorOf(ErrorCode::NotInitialized, [] { allreduce(torch::ones({1})); });
}

TEST(InitTest, MayBeCalledAgainAfterShutdownAndOldObjectsAreRefused) {
  init();
  const Handle handle = allreduce_async(torch::ones({2}), Sum("old"));
  EXPECT_EQ(synchronize(handle)[0].item<float>(), static_cast<float>(size()));
  auto weight = torch::ones({2}, torch::requires_grad());
  const NamedTensors names = {{"weight", weight}};
  auto optimizer =
      DistributedOptimizer(torch::optim::SGD({weight}, torch::optim::SGDOptions(0.1)), names);
  shutdown();
  for (int i = 0; i < 2; ++i) {
    init();
    EXPECT_EQ(allreduce(torch::ones({1}), Sum("old")).item<float>(), static_cast<float>(size()));
    EXPECT_THAT(ErrorOf(ErrorCode::NotInitialized, [&] { synchronize(handle); }),
                HasSubstr("\"old\""));
    ErrorOf(ErrorCode::NotInitialized, [&] { optimizer.step(); });
    shutdown();
  }
}

TEST(InitTest, ASecondCallDoesNothingButNewOptionsAreRefused) {
  init(InitOptions().set("stall_limit", "9min"));
  init();
  init(InitOptions().set("stall_limit", "9min"));
  EXPECT_THAT(
      ErrorOf(ErrorCode::InvalidArgument, [] { init(InitOptions().set("stall_limit", "8min")); }),
      HasSubstr("shutdown()"));
  EXPECT_EQ(allreduce(torch::ones({1}), Sum()).item<float>(), static_cast<float>(size()));
  shutdown();
}

TEST(InitTest, TakesItsFlagsOutOfTheArguments) {
  std::vector<std::string> words = {"program",
                                    "--epochs",
                                    "3",
                                    "--sirtaki-tree-arity=2",
                                    "--lr=1",
                                    "--",
                                    "--sirtaki-tree-arity=9"};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  int argc = static_cast<int>(words.size());
  init(argc, argv.data());
  shutdown();
  std::vector<std::string> rest(argv.begin(), argv.begin() + argc);
  EXPECT_EQ(rest, (std::vector<std::string>{"program", "--epochs", "3", "--lr=1", "--",
                                            "--sirtaki-tree-arity=9"}));
  EXPECT_EQ(argv[static_cast<std::size_t>(argc)], nullptr);
}

TEST(InitTest, ABadOptionOfOneRankIsThrownOnAll) {
  const int bad = WorldSize() - 1;
  InitOptions options;
  if (WorldRank() == bad) options.set("tree_arity", "many");
  const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] { init(options); });
  EXPECT_THAT(text, HasSubstr("tree_arity"));
  EXPECT_THAT(text, HasSubstr("many"));
  EXPECT_FALSE(is_initialized());
  EXPECT_THAT(
      ErrorOf(ErrorCode::InvalidArgument, [] { init(InitOptions().set("no_such_option", 1)); }),
      HasSubstr("no_such_option"));
  init();
  EXPECT_EQ(allreduce(torch::ones({1}), Sum()).item<float>(), static_cast<float>(size()));
  shutdown();
}

TEST(InitTest, OptionsThatMustAgreeAreComparedBetweenTheRanks) {
  if (WorldSize() == 1) GTEST_SKIP() << "needs two ranks";
  const auto text = ErrorOf(
      ErrorCode::Mismatch, [] { init(InitOptions().set("tree_arity", WorldRank() == 0 ? 2 : 3)); });
  EXPECT_THAT(text, HasSubstr("tree_arity"));
  EXPECT_FALSE(is_initialized());
}

TEST(InitTest, SharesTheCoresAmongTheRanksUnlessTold) {
  const int before = torch::get_num_threads();
  init(InitOptions().set("intra_op_threads", 1));
  EXPECT_EQ(torch::get_num_threads(), 1);
  shutdown();
  // LibTorch's own number comes back with a session that leaves the choice to it.
  init();
  if (!std::getenv("OMP_NUM_THREADS") && !std::getenv("MKL_NUM_THREADS")) {
    const auto ranks = static_cast<std::size_t>(local_size());
    const int cores =
        core::SharedCores(std::vector<core::CpuShare>(ranks, core::CpusOfThisProcess()));
    EXPECT_EQ(torch::get_num_threads(),
              local_size() == 1 ? before : std::max(1, cores / local_size()));
  }
  shutdown();
  torch::set_num_threads(before);
}

}  // namespace
}  // namespace sirtaki::tests
