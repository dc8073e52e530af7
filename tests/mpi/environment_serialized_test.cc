// RANKS: 1 2
// The environment where the program asked MPI for MPI_THREAD_SERIALIZED.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "mpi/environment.h"
#include "tests/support/mpi_main.h"
#include "tests/support/start_warnings.h"

namespace sirtaki::tests {
MpiStart WantedMpiStart() { return MpiStart::kSerialized; }
}  // namespace sirtaki::tests

namespace sirtaki::mpi {
namespace {

using core::Clock;
using core::Status;

TEST(EnvironmentSerializedTest, IsEnough) {
  std::unique_ptr<Environment> environment;
  const Status status =
      Environment::Start({}, Clock::now() + std::chrono::seconds(30), &environment);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_NE(environment->description().find("MPI_THREAD_SERIALIZED, initialised by the program"),
            std::string::npos)
      << environment->description();
}

// Its program does not call MPI while the library may.
TEST(EnvironmentSerializedTest, IsNoReasonToWarn) {
  const std::string own_host = "h" + std::to_string(tests::WorldRank());
  EXPECT_TRUE(tests::WarningsOfAStart(own_host, /*has_ob1=*/true).empty());
}

}  // namespace
}  // namespace sirtaki::mpi
