// RANKS: 2
// MPI's own initialisation takes longer than the environment's start may.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>

#include "mpi/environment.h"
#include "tests/support/mpi_interpose.h"
#include "tests/support/mpi_main.h"

namespace sirtaki::tests {
MpiStart WantedMpiStart() { return MpiStart::kNone; }
}  // namespace sirtaki::tests

namespace sirtaki::mpi {
namespace {

TEST(EnvironmentSlowTest, TheDeadlineCountsFromTheEndOfMpisOwnInitialisation) {
  constexpr std::chrono::seconds kPatience(10);
  tests::SlowNextMpi(kPatience + std::chrono::seconds(1));  // it asks whether MPI is initialised
  std::unique_ptr<Environment> environment;
  const core::Status status = Environment::Start({}, core::Clock::now() + kPatience, &environment);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

}  // namespace
}  // namespace sirtaki::mpi
