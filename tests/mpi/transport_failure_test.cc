// RANKS: 1 2 3
// What the transport makes of failures of MPI.
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "mpi/communicators.h"
#include "mpi/environment.h"
#include "mpi/transport.h"
#include "tests/support/mpi_interpose.h"
#include "tests/support/mpi_main.h"

namespace sirtaki::mpi {
namespace {

using core::Bytes;
using core::Clock;
using core::Status;
using core::StatusCode;
using tests::FailMpi;
using tests::MpiCall;
using tests::MpiCallsMade;

class TransportFailureTest : public testing::Test {
 protected:
  void SetUp() override {
    const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
    Status status = Environment::Start({}, deadline, &environment_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    status = Communicators::Make(*environment_, deadline, &communicators_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    transport_ = std::make_unique<Transport>(*communicators_);
  }
  void TearDown() override { tests::MendMpi(); }

  int Next() const { return (communicators_->rank() + 1) % communicators_->size(); }

  std::unique_ptr<Environment> environment_;
  std::unique_ptr<Communicators> communicators_;
  std::unique_ptr<Transport> transport_;
};

TEST_F(TransportFailureTest, FailedSendShowsInHealthAndNamesTheRank) {
  FailMpi(MpiCall::kIsend, MPI_ERR_INTERN);
  if (communicators_->size() > 1) {
    transport_->Send(Next(), Bytes(4));
    EXPECT_EQ(transport_->health().code(), StatusCode::kBackend);
    EXPECT_EQ(transport_->health().message().find("MPI_Isend to rank " + std::to_string(Next())),
              0U)
        << transport_->health().ToString();
  } else {
    transport_->Send(0, Bytes(4));  // to itself: MPI has no part in it
    EXPECT_TRUE(transport_->health().ok());
  }
}

TEST_F(TransportFailureTest, FailedProbeShowsInHealth) {
  FailMpi(MpiCall::kImprobe, MPI_ERR_INTERN);
  EXPECT_FALSE(transport_->TryReceive().has_value());
  EXPECT_EQ(transport_->health().message().find("MPI_Improbe: "), 0U)
      << transport_->health().ToString();
}

TEST_F(TransportFailureTest, FirstFailureStaysAndNothingIsReceivedAfterIt) {
  FailMpi(MpiCall::kImprobe, MPI_ERR_INTERN);
  EXPECT_FALSE(transport_->TryReceive().has_value());
  const Status first = transport_->health();
  tests::MendMpi();
  const std::int64_t probes = MpiCallsMade(MpiCall::kImprobe);
  EXPECT_FALSE(transport_->TryReceive().has_value());
  EXPECT_EQ(MpiCallsMade(MpiCall::kImprobe), probes);
  EXPECT_EQ(transport_->health(), first);
}

TEST_F(TransportFailureTest, RankThatCanNoLongerReceiveCanStillTellWhy) {
  if (communicators_->size() > 1) {
    if (communicators_->rank() == 1) {
      FailMpi(MpiCall::kImprobe, MPI_ERR_INTERN);
      EXPECT_FALSE(transport_->TryReceive().has_value());
      EXPECT_FALSE(transport_->health().ok());
      transport_->Send(0, Bytes(7));
      EXPECT_TRUE(transport_->Flush());
    } else if (communicators_->rank() == 0) {
      const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
      std::optional<core::Incoming> incoming;
      while (!incoming && Clock::now() < deadline) incoming = transport_->TryReceive();
      ASSERT_TRUE(incoming.has_value());
      EXPECT_EQ(incoming->bytes.size(), 7U);
    }
  }
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
}

TEST_F(TransportFailureTest, FailureWhileLookingAfterASendShowsInHealth) {
  if (communicators_->size() == 1) return;
  FailMpi(MpiCall::kTest, MPI_ERR_INTERN);
  transport_->Send(Next(), Bytes(4));
  EXPECT_EQ(transport_->health().message().find("MPI_Test of MPI_Isend to rank "), 0U)
      << transport_->health().ToString();
  EXPECT_TRUE(transport_->Flush());  // there is nothing more to be learned about it
}

TEST_F(TransportFailureTest, FailedReceiveShowsInHealth) {
  if (communicators_->size() > 1) {
    transport_->Send(Next(), Bytes(4));
    FailMpi(MpiCall::kImrecv, MPI_ERR_INTERN);
    const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
    while (transport_->health().ok() && Clock::now() < deadline) {
      EXPECT_FALSE(transport_->TryReceive().has_value());
    }
    EXPECT_EQ(transport_->health().message().find("MPI_Imrecv"), 0U)
        << transport_->health().ToString();
  }
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
}

TEST_F(TransportFailureTest, DestructorDoesNotWaitForAMessageThatNobodyTakes) {
  // Large, so that MPI cannot take it without the receiver.
  transport_->Send(Next(), Bytes(std::size_t{8} << 20));
  const core::TimePoint begin = Clock::now();
  transport_.reset();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(30));
  Environment::NoteFault();  // as its session would: the communicators stay
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
}

}  // namespace
}  // namespace sirtaki::mpi
