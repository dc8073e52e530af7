// RANKS: 1 2 3 4
// MPI's port keeps what ops/wire/port.h promises, and what is made of it what ops/base/backend.h does.
#include "mpi/port.h"

#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mpi/check.h"
#include "mpi/communicators.h"
#include "mpi/environment.h"
#include "ops/wire/wire_backend.h"
#include "tests/support/backend_conformance.h"
#include "tests/support/mpi_interpose.h"
#include "tests/support/mpi_main.h"

namespace sirtaki::mpi {
namespace {

using core::Clock;
using core::DType;
using core::Status;
using core::StatusCode;
using fusion::Lane;
using ops::Channel;
using tests::BackendCheck;
using tests::BackendConformance;
using tests::FailMpi;
using tests::MpiCall;
using tests::MpiCallsMade;

constexpr Channel kSmall{core::kWorldSet, Lane::kSmall};
constexpr Channel kLarge{core::kWorldSet, Lane::kLarge};

class MpiPortTest : public testing::Test {
 protected:
  void SetUp() override {
    const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
    Status status = Environment::Start({}, deadline, &environment_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    status = Communicators::Make(*environment_, deadline, &communicators_);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  void TearDown() override { tests::MendMpi(); }

  int rank() const { return communicators_->rank(); }
  int size() const { return communicators_->size(); }

  // All checks of the conformance test.
  void ExpectConforms(PortOptions options) {
    Port port(*communicators_, options);
    ops::wire::WireBackend backend(port, {});
    BackendConformance conformance(backend, rank(), size());
    for (const BackendCheck& check : tests::kBackendChecks) {
      SCOPED_TRACE(check.name);
      (conformance.*check.run)();
    }
  }

  static Status Finish(std::unique_ptr<ops::Completion> operation) {
    const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
    while (!operation->Poll()) {
      if (Clock::now() > deadline) {
        return {StatusCode::kTimedOut, "the operation does not end"};
      }
      std::this_thread::yield();
    }
    return operation->status();
  }

  std::unique_ptr<Environment> environment_;
  std::unique_ptr<Communicators> communicators_;
};

TEST_F(MpiPortTest, Conforms) { ExpectConforms({}); }

// MPI seems to count no further than this, so that everything but the smallest is cut.
TEST_F(MpiPortTest, ConformsInManyCalls) { ExpectConforms({.max_call_bytes = 5000}); }

TEST_F(MpiPortTest, SlicesAreCutAndNothingIsSentForEmptyOnes) {
  if (size() < 2) GTEST_SKIP() << "needs two ranks";
  Port port(*communicators_, {.max_call_bytes = 4});
  ops::wire::WireBackend backend(port, {});
  const std::string given = "0123456789";
  for (const Channel channel : {kSmall, kLarge}) {
    std::string taken(10, ' ');
    std::vector<ops::OutgoingSlice> outgoing;
    std::vector<ops::IncomingSlice> incoming;
    if (rank() == 0) outgoing = {{1, given.data(), 0}, {1, given.data() + 1, 9}};
    if (rank() == 1) incoming = {{0, taken.data(), 9}};
    const std::int64_t sends = MpiCallsMade(MpiCall::kIsend);
    ASSERT_TRUE(Finish(backend.Exchange(channel, outgoing, incoming)).ok());
    EXPECT_EQ(MpiCallsMade(MpiCall::kIsend), sends + (rank() == 0 ? 3 : 0));
    EXPECT_EQ(taken, rank() == 1 ? "123456789 " : "          ");
  }
}

// MPI has a limited number of communicators, and makes them in calls that block.
TEST_F(MpiPortTest, SetsNeedNoCommunicators) {
  Port port(*communicators_, {});
  ops::wire::WireBackend backend(port, {});
  const std::int64_t made = MpiCallsMade(MpiCall::kCommCreateGroup);
  const std::int64_t duplicated = MpiCallsMade(MpiCall::kCommIdup);
  BackendConformance(backend, rank(), size()).SetsComeAndGo();
  EXPECT_EQ(MpiCallsMade(MpiCall::kCommCreateGroup), made);
  EXPECT_EQ(MpiCallsMade(MpiCall::kCommIdup), duplicated);
}

// A message that a session did not take does not come up in the next one, though MPI still has it.
TEST_F(MpiPortTest, AMessageThatNobodyTookStaysInItsSession) {
  if (size() == 1) GTEST_SKIP() << "alone, MPICH keeps no message that nobody receives";
  static const int late = 1;  // MPI has the first one for ever
  static const int next = 2;
  const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
  int taken = 0;
  {
    Port port(*communicators_, {});
    ops::wire::WireBackend backend(port, {});
    ASSERT_TRUE(Finish(backend.SendMessage((rank() + 1) % size(), 5, &late, sizeof(late))).ok());
    auto unwanted = backend.ReceiveMessage(rank(), 6, &taken, sizeof(taken));
    EXPECT_FALSE(unwanted->Poll());
  }
  EXPECT_FALSE(Environment::HasFault());  // the receive was withdrawn
  communicators_.reset();
  ASSERT_TRUE(Communicators::Make(*environment_, deadline, &communicators_).ok());
  Port port(*communicators_, {});
  ops::wire::WireBackend backend(port, {});
  auto receive = backend.ReceiveMessage((rank() + size() - 1) % size(), 5, &taken, sizeof(taken));
  ASSERT_TRUE(Finish(backend.SendMessage((rank() + 1) % size(), 5, &next, sizeof(next))).ok());
  ASSERT_TRUE(Finish(std::move(receive)).ok());
  EXPECT_EQ(taken, 2);
}

// ---- failures of MPI, ordered on every rank alike ----

TEST_F(MpiPortTest, FailureOfASendOrReceiveNamesTheRank) {
  Port port(*communicators_, {});
  ops::wire::WireBackend backend(port, {});
  static float values[2] = {1.0F, 2.0F};  // MPI goes on with them
  FailMpi(MpiCall::kIsend, MPI_ERR_INTERN);
  Status status = Finish(backend.SendMessage(rank(), 1, values, 4));
  EXPECT_EQ(status.message().find("MPI_Isend to rank " + std::to_string(rank()) + ": "), 0U)
      << status.ToString();
  tests::MendMpi();
  FailMpi(MpiCall::kIrecv, MPI_ERR_INTERN);
  status = Finish(backend.ReceiveMessage(rank(), 1, values, 4));
  EXPECT_EQ(status.message().find("MPI_Irecv from rank " + std::to_string(rank()) + ": "), 0U)
      << status.ToString();
  tests::MendMpi();
  FailMpi(MpiCall::kTest, MPI_ERR_INTERN);
  status = Finish(backend.ReceiveMessage(rank(), 2, values, 4));
  EXPECT_EQ(status.message().find("MPI_Irecv from rank " + std::to_string(rank()) + ": "), 0U)
      << status.ToString();
}

TEST_F(MpiPortTest, AMessageOfAnotherLengthIsAnErrorOfTheReceive) {
  if (size() == 1) GTEST_SKIP() << "alone, MPICH keeps no message that nobody receives";
  Port port(*communicators_, {});
  ops::wire::WireBackend backend(port, {});
  static char given[4] = {};
  static char taken[4] = {};
  for (const std::int64_t bytes : {3, 4}) {
    // First the send: of a message to oneself whose receive waits already, Open MPI 4.1 drops what
    // is too much and says nothing.
    EXPECT_TRUE(Finish(backend.SendMessage(rank(), 8, given, 7 - bytes)).ok());
    const Status status = Finish(backend.ReceiveMessage(rank(), 8, taken, bytes));
    EXPECT_EQ(status.code(), StatusCode::kBackend);
    EXPECT_NE(
        status.message().find(bytes == 3 ? "truncated" : "3 bytes came where 4 were expected"),
        std::string::npos)
        << status.ToString();
  }
}

TEST_F(MpiPortTest, FailureInTheMiddleStartsNoFurtherCall) {
  if (size() == 1) GTEST_SKIP() << "alone there is nothing to send";
  Port port(*communicators_, {.max_call_bytes = 4});
  ops::wire::WireBackend backend(port, {});
  static std::string given(40, 'g');  // MPI goes on with them
  static std::string taken(40, 't');
  const ops::OutgoingSlice outgoing{(rank() + 1) % size(), given.data(), 40};
  const ops::IncomingSlice incoming{(rank() + size() - 1) % size(), taken.data(), 40};
  for (const Channel channel : {kLarge, kSmall}) {
    const std::int64_t before = MpiCallsMade(MpiCall::kIsend);
    FailMpi(MpiCall::kIsend, MPI_ERR_INTERN, /*skip=*/2);
    const Status status = Finish(backend.Exchange(channel, {&outgoing, 1}, {&incoming, 1}));
    EXPECT_EQ(status.code(), StatusCode::kBackend);
    EXPECT_EQ(status.message().find("MPI_Isend to rank "), 0U) << status.ToString();
    EXPECT_EQ(MpiCallsMade(MpiCall::kIsend), before + 3);
    tests::MendMpi();
  }
}

// Else the two directions of a slow link take turns.
TEST_F(MpiPortTest, WhatIsLargeIsSentBeforeAnythingIsReceived) {
  if (size() == 1) GTEST_SKIP() << "alone there is nothing to send";
  Port port(*communicators_, {.max_call_bytes = 5000});
  ops::wire::WireBackend backend(port, {});
  static std::string given(50000, 'g');  // MPI goes on with them
  static std::string taken(50000, 't');
  for (const std::int64_t bytes : {4096, 50000}) {
    const ops::OutgoingSlice outgoing{(rank() + 1) % size(), given.data(), bytes};
    const ops::IncomingSlice incoming{(rank() + size() - 1) % size(), taken.data(), bytes};
    const std::int64_t sends = MpiCallsMade(MpiCall::kIsend);
    FailMpi(MpiCall::kIrecv, MPI_ERR_INTERN);
    const Status status = Finish(backend.Exchange(kLarge, {&outgoing, 1}, {&incoming, 1}));
    EXPECT_EQ(status.message().find("MPI_Irecv from rank "), 0U) << status.ToString();
    EXPECT_EQ(MpiCallsMade(MpiCall::kIsend), sends + bytes / 5000);
    tests::MendMpi();
  }
}

TEST_F(MpiPortTest, FailureWhilePollingIsReturned) {
  if (size() == 1) GTEST_SKIP() << "alone there is nothing to poll";
  Port port(*communicators_, {});
  ops::wire::WireBackend backend(port, {});
  static float value = 1.0F;  // MPI goes on with it
  FailMpi(MpiCall::kTest, MPI_ERR_INTERN);
  auto operation = backend.AllReduce(kSmall, &value, 1, DType::kF32, core::ReduceOp::kSum, {});
  EXPECT_TRUE(operation->Poll());
  EXPECT_EQ(operation->status().code(), StatusCode::kBackend);
  EXPECT_EQ(operation->status().message().find("MPI_I"), 0U) << operation->status().ToString();
}

TEST_F(MpiPortTest, NothingStartsAfterAbort) {
  Port port(*communicators_, {});
  ops::wire::WireBackend backend(port, {});
  backend.Abort({StatusCode::kPeerLost, "rank 1 is gone"});
  backend.Abort({StatusCode::kAborted, "later"});
  const std::int64_t before = MpiCallsMade(MpiCall::kIsend) + MpiCallsMade(MpiCall::kIrecv);
  float value = 1.0F;
  for (const Channel channel : {kSmall, kLarge}) {
    if (size() == 1) break;
    const Status status =
        Finish(backend.AllReduce(channel, &value, 1, DType::kF32, core::ReduceOp::kSum, {}));
    EXPECT_EQ(status.message(), "rank 1 is gone");
  }
  EXPECT_EQ(Finish(backend.SendMessage(rank(), 0, &value, 4)).message(), "rank 1 is gone");
  EXPECT_EQ(Finish(backend.ReceiveMessage(rank(), 0, &value, 4)).message(), "rank 1 is gone");
  EXPECT_EQ(backend.AddSet(5, {rank()}).message(), "rank 1 is gone");
  EXPECT_EQ(MpiCallsMade(MpiCall::kIsend) + MpiCallsMade(MpiCall::kIrecv), before);
}

// What Open MPI may complete wrongly: of everything that a receive says of itself, all is compared
// and told.
TEST_F(MpiPortTest, AReceiveIsComparedInAllThatItSays) {
  const auto received = [](int source, int tag, int bytes, bool cancelled) {
    return CheckReceived({source, tag, bytes, /*error=*/17, cancelled},
                         {.source = 3, .tag = 5, .bytes = 7}, "MPI_Irecv");
  };
  EXPECT_TRUE(received(3, 5, 7, false).ok());
  for (const Status& status : {received(-1, 5, 7, false), received(3, 6, 7, false),
                               received(3, 5, 0, false), received(3, 5, 7, true)}) {
    EXPECT_EQ(status.code(), StatusCode::kBackend);
    for (const char* part : {"MPI_Irecv: ", "where 7 were expected", "from rank ",
                             "where 3 was expected", "where 5 was expected", "MPI_ERROR 17"}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    }
  }
  EXPECT_NE(received(3, 5, 7, true).message().find("cancelled"), std::string::npos);
}

}  // namespace
}  // namespace sirtaki::mpi
