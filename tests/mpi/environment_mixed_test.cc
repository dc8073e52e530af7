// RANKS: 2 3
// The environment where one rank alone asked MPI for too little.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>

#include "mpi/environment.h"
#include "tests/support/mpi_main.h"

namespace sirtaki::tests {

// Before MPI runs only the launcher's variables tell the rank.
MpiStart WantedMpiStart() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}) {
    const char* value = std::getenv(name);
    if (value != nullptr) {
      return std::string(value) == "1" ? MpiStart::kFunneled : MpiStart::kMultiple;
    }
  }
  return MpiStart::kMultiple;
}

}  // namespace sirtaki::tests

namespace sirtaki::mpi {
namespace {

TEST(EnvironmentMixedTest, TooFewThreadsOnOneRankAreToldToAll) {
  std::unique_ptr<Environment> environment;
  const core::Status status =
      Environment::Start({}, core::Clock::now() + std::chrono::seconds(30), &environment);
  EXPECT_EQ(status.code(), core::StatusCode::kUnsupported);
  EXPECT_EQ(status.message().find("rank 1 cannot start: a background thread has to call MPI"), 0U)
      << status.ToString();
  EXPECT_NE(status.message().find("the program initialised MPI with MPI_THREAD_FUNNELED"),
            std::string::npos)
      << status.ToString();
  EXPECT_EQ(status.origin().rank, 1);
  EXPECT_EQ(environment, nullptr);
  EXPECT_FALSE(Environment::HasFault());
}

}  // namespace
}  // namespace sirtaki::mpi
