// RANKS: 1 2 3 4
// The MPI transport keeps what core/protocol/transport.h promises.
#include "mpi/transport.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <utility>

#include "mpi/communicators.h"
#include "mpi/environment.h"
#include "tests/support/mpi_main.h"
#include "tests/support/transport_conformance.h"

namespace sirtaki::mpi {
namespace {

using core::Bytes;
using core::Clock;
using core::Incoming;
using tests::TransportCheck;
using tests::TransportConformance;

class MpiTransportTest : public testing::Test {
 protected:
  void SetUp() override {
    const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
    core::Status status = Environment::Start({}, deadline, &environment_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    status = Communicators::Make(*environment_, deadline, &communicators_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    transport_ = std::make_unique<Transport>(*communicators_);
  }

  int rank() const { return communicators_->rank(); }
  int size() const { return communicators_->size(); }

  // The next message, or an empty one after 30 s.
  Incoming Receive() {
    const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
    while (Clock::now() < deadline) {
      if (auto incoming = transport_->TryReceive()) return std::move(*incoming);
      transport_->WaitUntil(transport_->ArmDoorbell(),
                            Clock::now() + std::chrono::microseconds(50));
    }
    ADD_FAILURE() << "nothing arrived";
    return {};
  }

  std::unique_ptr<Environment> environment_;
  std::unique_ptr<Communicators> communicators_;
  std::unique_ptr<Transport> transport_;
};

TEST_F(MpiTransportTest, Conforms) {
  TransportConformance conformance(*transport_, rank(), size());
  for (const TransportCheck& check : tests::kTransportChecks) {
    SCOPED_TRACE(check.name);
    (conformance.*check.run)();
  }
}

TEST_F(MpiTransportTest, MessageToItselfArrivesInOrder) {
  transport_->Send(rank(), Bytes(3, std::byte{1}));
  transport_->Send(rank(), Bytes{});
  EXPECT_TRUE(transport_->Flush());
  const Incoming first = Receive();
  EXPECT_EQ(first.from, rank());
  EXPECT_EQ(first.bytes, Bytes(3, std::byte{1}));
  EXPECT_TRUE(Receive().bytes.empty());
  EXPECT_FALSE(transport_->TryReceive().has_value());
}

TEST_F(MpiTransportTest, LargeMessageIsNotOvertakenByItsSendersLaterOnes) {
  if (size() < 2) GTEST_SKIP() << "needs two ranks";
  constexpr std::size_t kLarge = std::size_t{16} << 20;
  if (rank() == 1) {
    transport_->Send(0, Bytes(kLarge, std::byte{7}));
    transport_->Send(0, Bytes(1, std::byte{8}));
    Receive();  // rank 0 has both
  } else if (rank() == 0) {
    EXPECT_EQ(Receive().bytes.size(), kLarge);
    EXPECT_EQ(Receive().bytes.size(), 1U);
    transport_->Send(1, Bytes(1));
  }
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
}

TEST_F(MpiTransportTest, TwoSessionsDoNotSeeEachOthersMessages) {
  std::unique_ptr<Communicators> others;
  const core::Status status =
      Communicators::Make(*environment_, Clock::now() + std::chrono::seconds(30), &others);
  ASSERT_TRUE(status.ok()) << status.ToString();
  Transport other(*others);
  const int next = (rank() + 1) % size();
  other.Send(next, Bytes(5));
  transport_->Send(next, Bytes(9));
  EXPECT_EQ(Receive().bytes.size(), 9U);
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
  std::optional<Incoming> mine;
  const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
  while (!mine && Clock::now() < deadline) mine = other.TryReceive();
  ASSERT_TRUE(mine.has_value());
  EXPECT_EQ(mine->bytes.size(), 5U);
  EXPECT_FALSE(transport_->TryReceive().has_value());
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
}

// One session ends and another starts: the second finds what came too late for the
// first, and all of its own.
TEST_F(MpiTransportTest, LateMessageOfAnEndedSessionDoesNoHarmToTheNext) {
  if (size() < 2) GTEST_SKIP() << "needs two ranks";
  const int next = (rank() + 1) % size();
  const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
  for (int round = 0; round < 20; ++round) {
    transport_->Send(next, Bytes(1, std::byte{1}));  // nobody receives it
    transport_.reset();
    communicators_.reset();
    ASSERT_TRUE(Communicators::Make(*environment_, deadline, &communicators_).ok());
    transport_ = std::make_unique<Transport>(*communicators_);
    transport_->Send(next, Bytes(2));
    Incoming incoming = Receive();
    if (incoming.bytes.size() == 1) incoming = Receive();
    ASSERT_EQ(incoming.bytes.size(), 2U);
  }
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
}

TEST_F(MpiTransportTest, MessageTooLongForMpiIsAFailureAndNotSent) {
  if (size() != 2) GTEST_SKIP() << "needs 2 GiB, so only once: with two ranks";
  if (rank() == 0) {
    transport_->Send(1, Bytes(std::size_t{1} << 31));
    EXPECT_EQ(transport_->health().code(), core::StatusCode::kBackend);
    EXPECT_EQ(transport_->health().message(),
              "a message of 2147483648 bytes to rank 1 is too long for MPI, which takes at most "
              "2147483647");
    transport_->Send(1, Bytes(3));
    EXPECT_TRUE(transport_->Flush());
  } else {
    EXPECT_EQ(Receive().bytes.size(), 3U);
  }
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
}

}  // namespace
}  // namespace sirtaki::mpi
