// RANKS: 1 2
// The environment where the program asked MPI for too little.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "mpi/environment.h"
#include "tests/support/mpi_main.h"

namespace sirtaki::tests {
MpiStart WantedMpiStart() { return MpiStart::kFunneled; }
}  // namespace sirtaki::tests

namespace sirtaki::mpi {
namespace {

TEST(EnvironmentFunneledTest, IsRefusedWithWhatToCall) {
  std::unique_ptr<Environment> environment;
  const core::Status status =
      Environment::Start({}, core::Clock::now() + std::chrono::seconds(30), &environment);
  EXPECT_EQ(status.code(), core::StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("the program initialised MPI with MPI_THREAD_FUNNELED: call "
                                  "MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided)"),
            std::string::npos)
      << status.ToString();
  EXPECT_EQ(environment, nullptr);
}

}  // namespace
}  // namespace sirtaki::mpi
