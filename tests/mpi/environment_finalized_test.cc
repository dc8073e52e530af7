// RANKS: 1 2
// A program that finalizes MPI before it is done with the library.
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <memory>
#include <string>

#include "mpi/communicators.h"
#include "mpi/environment.h"
#include "tests/support/mpi_main.h"

namespace sirtaki::mpi {
namespace {

using core::Clock;
using core::Status;
using core::StatusCode;

TEST(EnvironmentFinalizedTest, HookRunsInMpiFinalizeWhileMpiStillWorks) {
  const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
  std::unique_ptr<Environment> environment;
  std::unique_ptr<Communicators> communicators;
  int of_one_that_is_gone = 0;
  ASSERT_TRUE(Environment::Start({}, deadline, &environment).ok());
  ASSERT_TRUE(environment->BeforeFinalize([&] { ++of_one_that_is_gone; }).ok());
  environment.reset();
  ASSERT_TRUE(Environment::Start({}, deadline, &environment).ok());
  ASSERT_TRUE(Communicators::Make(*environment, deadline, &communicators).ok());
  int calls = 0;
  ASSERT_TRUE(environment->BeforeFinalize([&] { calls += 10; }).ok());  // is replaced
  const Status status = environment->BeforeFinalize([&] {
    ++calls;
    EXPECT_TRUE(tests::TrueOnAllRanks(true));
    communicators.reset();
    environment.reset();  // a shutdown takes the environment along
  });
  ASSERT_TRUE(status.ok()) << status.ToString();

  MPI_Finalize();

  EXPECT_EQ(calls, 1);
  EXPECT_EQ(of_one_that_is_gone, 0);
  EXPECT_EQ(environment, nullptr);
}

TEST(EnvironmentFinalizedTest, StartAfterMpiFinalizeIsRefused) {
  std::unique_ptr<Environment> environment;
  const Status status =
      Environment::Start({}, Clock::now() + std::chrono::seconds(30), &environment);
  EXPECT_EQ(status.code(), StatusCode::kNotInitialized);
  EXPECT_NE(status.message().find("MPI was finalized already"), std::string::npos)
      << status.ToString();
  EXPECT_EQ(environment, nullptr);
}

}  // namespace
}  // namespace sirtaki::mpi
