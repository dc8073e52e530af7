// RANKS: 2
// MPI's own initialisation takes longer than the environment's start may.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>

#include "mpi/environment.h"
#include "tests/support/mpi_interpose.h"
#include "tests/support/mpi_main.h"

namespace sirtaki::tests {
MpiStart WantedMpiStart() { return MpiStart::kNone; }
}  // namespace sirtaki::tests

namespace sirtaki::mpi {
namespace {

TEST(EnvironmentSlowTest, TheDeadlineCountsFromTheEndOfMpisOwnInitialisation) {
  static constexpr std::chrono::seconds kPatience(10);
  tests::SlowMpi(kPatience + std::chrono::seconds(1));
  std::thread mends([] {  // while the first call, by which MPI is to be initialised, sleeps
    std::this_thread::sleep_for(kPatience / 2);
    tests::SlowMpi(std::chrono::microseconds(0));
  });
  std::unique_ptr<Environment> environment;
  const core::Status status = Environment::Start({}, core::Clock::now() + kPatience, &environment);
  EXPECT_TRUE(status.ok()) << status.ToString();
  mends.join();
}

}  // namespace
}  // namespace sirtaki::mpi
