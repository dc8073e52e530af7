// RANKS: 1 2 3
// The environment where nobody has initialised MPI. The tests run in their order.
#include <gtest/gtest.h>
#include <mpi.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "mpi/environment.h"
#include "tests/support/mpi_main.h"
#include "tests/support/start_warnings.h"

namespace sirtaki::tests {
MpiStart WantedMpiStart() { return MpiStart::kNone; }
}  // namespace sirtaki::tests

namespace sirtaki::mpi {
namespace {

using core::Clock;
using core::Status;

pid_t main_process = 0;

bool IsFinalized() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized != 0;
}

// Registered before the environment's own, so it runs after it.
void CheckFinalizedAtExit() {
  if (IsFinalized() == (getpid() == main_process)) return;
  std::printf("FAILED: MPI was %s at exit\n",
              IsFinalized() ? "finalized in a forked child" : "not finalized");
  std::fflush(stdout);
  _exit(1);
}

TEST(EnvironmentOwnTest, InitialisesMpiWithThreads) {
  main_process = getpid();
  std::atexit(CheckFinalizedAtExit);
  int initialized = 0;
  MPI_Initialized(&initialized);
  ASSERT_EQ(initialized, 0);

  std::unique_ptr<Environment> environment;
  const Status status =
      Environment::Start({}, Clock::now() + std::chrono::seconds(30), &environment);
  ASSERT_TRUE(status.ok()) << status.ToString();
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  EXPECT_EQ(level, MPI_THREAD_MULTIPLE);
  EXPECT_NE(environment->description().find("initialised by sirtaki"), std::string::npos)
      << environment->description();
}

// The program has not asked MPI for threads, so nothing is known against it.
TEST(EnvironmentOwnTest, WarnsOfNoThreads) {
  const std::string own_host = "h" + std::to_string(tests::WorldRank());
  EXPECT_TRUE(tests::WarningsOfAStart(own_host, /*has_ob1=*/true).empty());
}

TEST(EnvironmentOwnTest, LeavesMpiInitialisedBetweenStarts) {
  EXPECT_FALSE(IsFinalized());
  std::unique_ptr<Environment> environment;
  const Status status =
      Environment::Start({}, Clock::now() + std::chrono::seconds(30), &environment);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_NE(environment->description().find("initialised by sirtaki"), std::string::npos);
}

TEST(EnvironmentOwnTest, ForkedChildDoesNotFinalize) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) std::exit(0);  // with what was registered for the exit
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace sirtaki::mpi
