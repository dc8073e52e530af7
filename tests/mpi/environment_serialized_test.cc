// RANKS: 1 2
// The environment where the program asked MPI for MPI_THREAD_SERIALIZED.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "mpi/environment.h"
#include "tests/support/mpi_main.h"

namespace sirtaki::tests {
MpiStart WantedMpiStart() { return MpiStart::kSerialized; }
}  // namespace sirtaki::tests

namespace sirtaki::mpi {
namespace {

using core::Clock;
using core::Status;
using core::StatusCode;

TEST(EnvironmentSerializedTest, RunsSerializedAndSaysSo) {
  std::unique_ptr<Environment> environment;
  const Status status =
      Environment::Start({}, Clock::now() + std::chrono::seconds(30), &environment);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_TRUE(environment->serialized());
  EXPECT_NE(
      environment->description().find(
          "MPI_THREAD_SERIALIZED: both host lanes are non-blocking, initialised by the program"),
      std::string::npos)
      << environment->description();
}

TEST(EnvironmentSerializedTest, MultipleIsRefused) {
  EnvironmentOptions options;
  options.threads = Threads::kMultiple;
  std::unique_ptr<Environment> environment;
  const Status status =
      Environment::Start(options, Clock::now() + std::chrono::seconds(30), &environment);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("mpi_threads=multiple"), std::string::npos) << status.ToString();
}

TEST(EnvironmentSerializedTest, MultipleOnOneRankIsRefusedByAll) {
  EnvironmentOptions options;
  const bool last = tests::WorldRank() == tests::WorldSize() - 1;
  if (last) options.threads = Threads::kMultiple;
  std::unique_ptr<Environment> environment;
  const Status status =
      Environment::Start(options, Clock::now() + std::chrono::seconds(30), &environment);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.ToString();
  EXPECT_NE(status.message().find("mpi_threads=multiple"), std::string::npos) << status.ToString();
  if (tests::WorldSize() > 1) {
    const std::string who = "rank " + std::to_string(tests::WorldSize() - 1);
    EXPECT_EQ(status.message().find(who + " cannot start: "), 0U) << status.ToString();
  }
  EXPECT_EQ(environment, nullptr);
}

}  // namespace
}  // namespace sirtaki::mpi
