// RANKS: 1 2 3 4
// The environment where the program has initialised MPI with MPI_THREAD_MULTIPLE.
#include "mpi/environment.h"

#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/mpi_main.h"
#include "tests/support/start_warnings.h"

namespace sirtaki::mpi {
namespace {

using core::Clock;
using core::Status;
using core::StatusCode;
using std::chrono::seconds;

std::unique_ptr<Environment> Started(EnvironmentOptions options = {}) {
  std::unique_ptr<Environment> environment;
  const Status status = Environment::Start(options, Clock::now() + seconds(30), &environment);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return environment;
}

EnvironmentOptions WithVariables(core::EnvironmentView variables) {
  EnvironmentOptions options;
  options.variables = std::move(variables);
  return options;
}

TEST(EnvironmentTest, KnowsItsRankAndSize) {
  const auto environment = Started();
  ASSERT_NE(environment, nullptr);
  EXPECT_EQ(environment->topology().rank, tests::WorldRank());
  EXPECT_EQ(environment->topology().size, tests::WorldSize());
}

TEST(EnvironmentTest, RanksOfThisMachineAreOneHost) {
  const auto environment = Started();
  ASSERT_NE(environment, nullptr);
  const core::Topology& topology = environment->topology();
  EXPECT_EQ(topology.local_rank, tests::WorldRank());
  EXPECT_EQ(topology.local_size, tests::WorldSize());
  EXPECT_EQ(topology.cross_rank, 0);
  EXPECT_EQ(topology.cross_size, 1);
  EXPECT_TRUE(topology.homogeneous);
  EXPECT_EQ(topology.host_of_rank, std::vector<int>(static_cast<std::size_t>(topology.size), 0));
  EXPECT_EQ(topology.host_names, std::vector<std::string>{topology.host});
  EXPECT_FALSE(topology.host.empty());
}

TEST(EnvironmentTest, SaysWhichMpiItIsAndWhoInitialisedIt) {
  const auto environment = Started();
  ASSERT_NE(environment, nullptr);
  EXPECT_NE(environment->description().find("MPI_THREAD_MULTIPLE, initialised by the program"),
            std::string::npos)
      << environment->description();
}

TEST(EnvironmentTest, ExchangeGivesEveryRanksStringByRank) {
  const auto environment = Started();
  ASSERT_NE(environment, nullptr);
  const auto text_of = [](int rank) {
    return std::string(static_cast<std::size_t>(rank) * 1000, static_cast<char>('a' + rank));
  };
  std::vector<std::string> all;
  const Status status =
      environment->Exchange(text_of(tests::WorldRank()), Clock::now() + seconds(30), &all);
  ASSERT_TRUE(status.ok()) << status.ToString();
  ASSERT_EQ(all.size(), static_cast<std::size_t>(tests::WorldSize()));
  for (int rank = 0; rank < tests::WorldSize(); ++rank) {
    EXPECT_EQ(all[static_cast<std::size_t>(rank)], text_of(rank));
  }
}

TEST(EnvironmentTest, ExchangeCarriesZeroBytesInAString) {
  const auto environment = Started();
  ASSERT_NE(environment, nullptr);
  const std::string mine("a\0b", 3);
  std::vector<std::string> all;
  ASSERT_TRUE(environment->Exchange(mine, Clock::now() + seconds(30), &all).ok());
  for (const std::string& text : all) EXPECT_EQ(text, mine);
}

TEST(EnvironmentTest, CanBeStartedAgainAndAgain) {
  for (int i = 0; i < 50; ++i) ASSERT_NE(Started(), nullptr);
}

// The program may call MPI while the library does, which loses data under ob1 between hosts.
TEST(EnvironmentTest, RankZeroWarnsOfTwoThreadsInMpiUnderOb1BetweenHosts) {
  const std::string own_host = "h" + std::to_string(tests::WorldRank());
  const std::vector<std::string> warnings = tests::WarningsOfAStart(own_host, /*has_ob1=*/true);
  if (tests::WorldRank() != 0 || tests::WorldSize() == 1) {
    EXPECT_TRUE(warnings.empty()) << warnings.front();
    return;
  }
  ASSERT_EQ(warnings.size(), 1U);
  for (const char* part : {"MPI_THREAD_MULTIPLE", "pause_mpi()", "MpiGate", "docs/mpi.md"}) {
    EXPECT_NE(warnings.front().find(part), std::string::npos) << warnings.front();
  }
}

TEST(EnvironmentTest, NobodyWarnsOfThreadsOnOneHostOrWithoutOb1) {
  const std::string own_host = "h" + std::to_string(tests::WorldRank());
  EXPECT_TRUE(tests::WarningsOfAStart("h", /*has_ob1=*/true).empty());
  EXPECT_TRUE(tests::WarningsOfAStart(own_host, /*has_ob1=*/false).empty());
}

TEST(EnvironmentTest, LeavesTheProgramsErrorHandlerAlone) {
  MPI_Errhandler before = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &before);
  const auto environment = Started();
  MPI_Errhandler after = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &after);
  EXPECT_EQ(before, after);
  EXPECT_EQ(after, MPI_ERRORS_ARE_FATAL);
}

TEST(EnvironmentTest, LauncherOfAnotherMpiIsFoundOut) {
  if (tests::WorldSize() != 1) {
    EXPECT_NE(Started(WithVariables({{"OMPI_COMM_WORLD_SIZE", "64"}})), nullptr);
    return;
  }
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "WORLD_SIZE"}) {
    std::unique_ptr<Environment> environment;
    const Status status =
        Environment::Start(WithVariables({{name, "4"}}), Clock::now() + seconds(30), &environment);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.ToString();
    EXPECT_NE(status.message().find(std::string(name) + "=4"), std::string::npos)
        << status.ToString();
    EXPECT_NE(status.message().find("mpirun that belongs to the MPI"), std::string::npos)
        << status.ToString();
  }
}

TEST(EnvironmentTest, InnerLaunchersWordCounts) {
  const auto environment =
      Started(WithVariables({{"OMPI_COMM_WORLD_SIZE", std::to_string(tests::WorldSize())},
                             {"SLURM_STEP_NUM_TASKS", "8"}}));
  EXPECT_NE(environment, nullptr);
}

}  // namespace
}  // namespace sirtaki::mpi
