// RANKS: 1
// The gate of MPI lets threads wait with a name, and not for ever.
#include "mpi/gate.h"

#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <string>
#include <thread>

#include "mpi/environment.h"
#include "tests/support/mpi_main.h"

namespace sirtaki::mpi {
namespace {

using core::Status;
using core::StatusCode;

// A thread that is in a call.
class Holder {
 public:
  explicit Holder(const char* call)
      : thread_([this, call] {
          const Entry entry(call);
          EXPECT_TRUE(entry.ok()) << entry.status().ToString();
          inside_.count_down();
          leave_.wait();
        }) {
    inside_.wait();
  }
  ~Holder() {
    leave_.count_down();
    thread_.join();
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

 private:
  std::latch inside_{1};
  std::latch leave_{1};
  std::thread thread_;
};

TEST(GateOfMpiTest, AThreadThatHasItIsToldSoAndDoesNotWait) {
  const Entry entry("an MpiGate of the program");
  ASSERT_TRUE(entry.ok());
  EXPECT_TRUE(Gate().IsHeldByThisThread());
  const Status again = InMpi("MPI_Test", [] { return 0; });
  EXPECT_EQ(again.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(again.message(),
            "MPI_Test: this thread is in an MpiGate of the program, which keeps every other call "
            "out of MPI: destroy the MpiGate first");
  EXPECT_TRUE(Gate().IsHeldByThisThread());
}

TEST(GateOfMpiTest, AThreadWaitsUntilTheOtherOneHasLeft) {
  std::thread waits;
  {
    const Holder holder("MPI_Test");
    EXPECT_EQ(Gate().Holder(), "MPI_Test");
    waits = std::thread([&] {
      const Entry entry("MPI_Isend");
      EXPECT_TRUE(entry.ok()) << entry.status().ToString();
      EXPECT_EQ(Gate().Holder(), "MPI_Isend");
    });
  }
  waits.join();
  EXPECT_EQ(Gate().Holder(), "");
}

// The last test: a fault is for the life of the process.
TEST(GateOfMpiTestAtLast, AfterAFaultAWaitEndsAndNamesBothCalls) {
  const Holder holder("MPI_Test");
  Environment::NoteFault();
  const Status status = Enter("MPI_Isend", std::chrono::milliseconds(5));
  EXPECT_EQ(status.code(), StatusCode::kBackend);
  EXPECT_EQ(status.message().find("MPI_Isend: another thread does not come out of MPI_Test"), 0U)
      << status.message();
  EXPECT_FALSE(Gate().IsHeldByThisThread());
}

}  // namespace
}  // namespace sirtaki::mpi
