// RANKS: 1 2 3
// What becomes of the start when MPI fails or a rank does not come.
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "mpi/communicators.h"
#include "mpi/environment.h"
#include "tests/support/mpi_interpose.h"
#include "tests/support/mpi_main.h"
#include "tests/support/within.h"

namespace sirtaki::mpi {
namespace {

using core::Clock;
using core::Status;
using core::StatusCode;
using std::chrono::milliseconds;
using std::chrono::seconds;
using tests::FailMpi;
using tests::MpiCall;

class EnvironmentFailureTest : public testing::Test {
 protected:
  void TearDown() override { tests::MendMpi(); }
  std::unique_ptr<Environment> environment_;
};

TEST_F(EnvironmentFailureTest, ErrorNamesTheCallAndGivesMpisWords) {
  FailMpi(MpiCall::kCommIdup, MPI_ERR_INTERN);
  const Status status = Environment::Start({}, Clock::now() + seconds(30), &environment_);
  EXPECT_EQ(status.code(), StatusCode::kBackend);
  char words[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(MPI_ERR_INTERN, words, &length);
  EXPECT_EQ(status.message(), "MPI_Comm_idup: " + std::string(words));
  EXPECT_TRUE(Environment::HasFault());
}

TEST_F(EnvironmentFailureTest, ErrorInAnExchangeIsReturned) {
  const Status started = Environment::Start({}, Clock::now() + seconds(30), &environment_);
  ASSERT_TRUE(started.ok()) << started.ToString();
  FailMpi(MpiCall::kIallgatherv, MPI_ERR_INTERN);
  std::vector<std::string> all;
  const Status status = environment_->Exchange("x", Clock::now() + seconds(30), &all);
  EXPECT_EQ(status.code(), StatusCode::kBackend);
  EXPECT_EQ(status.message().find("MPI_Iallgatherv: "), 0U) << status.ToString();
}

TEST_F(EnvironmentFailureTest, ErrorWhileMakingCommunicatorsIsReturned) {
  const Status started = Environment::Start({}, Clock::now() + seconds(30), &environment_);
  ASSERT_TRUE(started.ok()) << started.ToString();
  FailMpi(MpiCall::kCommIdup, MPI_ERR_INTERN, /*skip=*/2);
  std::unique_ptr<Communicators> communicators;
  const Status status =
      Communicators::Make(*environment_, Clock::now() + seconds(30), &communicators);
  EXPECT_EQ(status.code(), StatusCode::kBackend);
  EXPECT_EQ(communicators, nullptr);
}

// Rank 0 comes when the others have seen that a second thread does not wait for the first for ever.
TEST_F(EnvironmentFailureTest, ASecondThreadWaitsForTheFirstUntilItsDeadline) {
  const bool late = tests::WorldRank() == 0;
  const std::int64_t made = tests::MpiCallsMade(MpiCall::kCommIdup);
  std::thread first;
  if (!late) {
    first = std::thread([this] {
      const Status status = Environment::Start({}, Clock::now() + seconds(100), &environment_);
      EXPECT_TRUE(status.ok()) << status.ToString();
    });
    ASSERT_TRUE(
        tests::Within(seconds(60), [&] { return tests::MpiCallsMade(MpiCall::kCommIdup) > made; }));
    std::unique_ptr<Environment> second;
    const Status status = Environment::Start({}, Clock::now() + milliseconds(100), &second);
    EXPECT_EQ(status.code(), StatusCode::kTimedOut) << status.ToString();
    EXPECT_NE(status.message().find("another thread's init()"), std::string::npos)
        << status.ToString();
  }
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
  if (late) {
    const Status status = Environment::Start({}, Clock::now() + seconds(100), &environment_);
    EXPECT_TRUE(status.ok()) << status.ToString();
  } else {
    first.join();
  }
}

TEST_F(EnvironmentFailureTest, RankThatDoesNotComeIsATimeOut) {
  const bool late = tests::WorldSize() > 1 && tests::WorldRank() == 0;
  const core::TimePoint begin = Clock::now();
  if (!late && tests::WorldSize() > 1) {
    const Status status = Environment::Start({}, begin + milliseconds(200), &environment_);
    EXPECT_EQ(status.code(), StatusCode::kTimedOut) << status.ToString();
    EXPECT_NE(status.message().find("the other ranks did not take part in time"), std::string::npos)
        << status.ToString();
    EXPECT_GE(Clock::now() - begin, milliseconds(200));
    EXPECT_EQ(environment_, nullptr);
  }
  EXPECT_TRUE(tests::TrueOnAllRanks(true));  // the others have given up
  if (late) {
    // It comes at last and finds nobody; what the others left behind in MPI does no harm.
    const Status status = Environment::Start({}, Clock::now() + milliseconds(200), &environment_);
    EXPECT_EQ(status.code(), StatusCode::kTimedOut) << status.ToString();
  }
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
  // All begin once more, which ends after what was left behind: Open MPI may crash when it is
  // finalized in the middle of making a communicator.
  const Status status = Environment::Start({}, Clock::now() + seconds(60), &environment_);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

}  // namespace
}  // namespace sirtaki::mpi
