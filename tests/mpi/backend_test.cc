// RANKS: 1 2 3 4
// The MPI backend keeps what ops/base/backend.h promises, in every way of calling MPI.
#include "mpi/backend.h"

#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mpi/communicators.h"
#include "mpi/environment.h"
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

class MpiBackendTest : public testing::Test {
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
  void ExpectConforms(BackendOptions options) {
    Backend backend(*communicators_, options);
    BackendConformance::Traits traits;
    traits.lanes_run_at_once = !options.serialized;
    BackendConformance conformance(backend, rank(), size(), traits);
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

TEST_F(MpiBackendTest, Conforms) { ExpectConforms({}); }

TEST_F(MpiBackendTest, ConformsSerialized) {
  BackendOptions options;
  options.serialized = true;
  ExpectConforms(options);
}

// As if MPI could count no further than this, so that everything but the smallest is cut.
TEST_F(MpiBackendTest, ConformsInManyCalls) {
  BackendOptions options;
  options.max_call_bytes = 5000;
  ExpectConforms(options);
}

TEST_F(MpiBackendTest, ConformsInManyCallsSerialized) {
  BackendOptions options;
  options.max_call_bytes = 5000;
  options.serialized = true;
  ExpectConforms(options);
}

TEST_F(MpiBackendTest, LargeLaneBlocksInMpiAndSmallLaneDoesNot) {
  Backend backend(*communicators_, {});
  const std::int64_t blocking = MpiCallsMade(MpiCall::kAllreduce);
  const std::int64_t polled = MpiCallsMade(MpiCall::kIallreduce);
  float value = 1.0F;
  ASSERT_TRUE(Finish(backend.AllReduce(kLarge, &value, 1, DType::kF32, core::ReduceOp::kSum)).ok());
  EXPECT_EQ(MpiCallsMade(MpiCall::kAllreduce), blocking + 1);
  EXPECT_EQ(MpiCallsMade(MpiCall::kIallreduce), polled);
  ASSERT_TRUE(Finish(backend.AllReduce(kSmall, &value, 1, DType::kF32, core::ReduceOp::kSum)).ok());
  EXPECT_EQ(MpiCallsMade(MpiCall::kAllreduce), blocking + 1);
  EXPECT_EQ(MpiCallsMade(MpiCall::kIallreduce), polled + 1);
}

TEST_F(MpiBackendTest, VectorIsCutInWholeElements) {
  BackendOptions options;
  options.max_call_bytes = 20;  // two and a half elements
  Backend backend(*communicators_, options);
  const std::int64_t before = MpiCallsMade(MpiCall::kAllreduce);
  std::vector<double> values(5, 1.5);
  ASSERT_TRUE(
      Finish(backend.AllReduce(kLarge, values.data(), 5, DType::kF64, core::ReduceOp::kSum)).ok());
  EXPECT_EQ(MpiCallsMade(MpiCall::kAllreduce), before + 3);
  EXPECT_EQ(values, std::vector<double>(5, 1.5 * size()));
}

TEST_F(MpiBackendTest, GatherTooLargeForOneCallGoesStraightIntoPlace) {
  BackendOptions options;
  options.max_call_bytes = 7;
  Backend backend(*communicators_, options);
  std::vector<std::int64_t> bytes;
  std::vector<char> expected;
  for (int r = 0; r < size(); ++r) {
    bytes.push_back(8 + r);
    expected.insert(expected.end(), static_cast<std::size_t>(8 + r), static_cast<char>('a' + r));
  }
  for (const Channel channel : {kSmall, kLarge}) {
    const std::vector<char> mine(static_cast<std::size_t>(8 + rank()),
                                 static_cast<char>('a' + rank()));
    std::vector<char> all(expected.size());
    ASSERT_TRUE(Finish(backend.AllGatherV(channel, mine.data(), all.data(), bytes)).ok());
    EXPECT_EQ(all, expected);
  }
}

TEST_F(MpiBackendTest, ExchangeTooLargeForOneCallIsCutInSlicesOfEveryPart) {
  BackendOptions options;
  options.max_call_bytes = 4 * size() + 1;
  Backend backend(*communicators_, options);
  const auto ranks = static_cast<std::size_t>(size());
  std::vector<char> mine;
  std::vector<char> expected;
  for (std::size_t r = 0; r < ranks; ++r) {
    for (int i = 0; i < 11; ++i) {
      mine.push_back(static_cast<char>(11 * rank() + 3 * static_cast<int>(r) + i));
      expected.push_back(static_cast<char>(11 * static_cast<int>(r) + 3 * rank() + i));
    }
  }
  for (const Channel channel : {kSmall, kLarge}) {
    const MpiCall call = channel.lane == Lane::kLarge ? MpiCall::kAlltoall : MpiCall::kIalltoall;
    const std::int64_t before = MpiCallsMade(call);
    std::vector<char> all(expected.size());
    ASSERT_TRUE(Finish(backend.AllToAll(channel, mine.data(), all.data(), 11)).ok());
    EXPECT_EQ(MpiCallsMade(call), before + 3);  // 4, 4 and 3 bytes of each part
    EXPECT_EQ(all, expected);
  }
}

TEST_F(MpiBackendTest, SlicesAreCutAndNothingIsSentForEmptyOnes) {
  if (size() < 2) GTEST_SKIP() << "needs two ranks";
  BackendOptions options;
  options.max_call_bytes = 4;
  Backend backend(*communicators_, options);
  const std::string given = "0123456789";
  for (const Channel channel : {kSmall, kLarge}) {
    std::string taken(10, ' ');
    std::vector<ops::OutgoingSlice> outgoing;
    std::vector<ops::IncomingSlice> incoming;
    if (rank() == 0) outgoing = {{1, given.data(), 0}, {1, given.data() + 1, 9}};
    if (rank() == 1) incoming = {{0, taken.data(), 9}};
    const std::int64_t sends = MpiCallsMade(MpiCall::kIsend);
    const std::int64_t waits = MpiCallsMade(MpiCall::kWait);
    ASSERT_TRUE(Finish(backend.Exchange(channel, outgoing, incoming)).ok());
    EXPECT_EQ(MpiCallsMade(MpiCall::kIsend), sends + (rank() == 0 ? 3 : 0));
    const bool blocks = channel.lane == Lane::kLarge && rank() < 2;
    EXPECT_EQ(MpiCallsMade(MpiCall::kWait), waits + (blocks ? 3 : 0));
    EXPECT_EQ(taken, rank() == 1 ? "123456789 " : "          ");
  }
}

// MPI has a limited number of communicators.
TEST_F(MpiBackendTest, EverySetFreesWhatItMade) {
  Backend backend(*communicators_, {});
  const std::int64_t made = MpiCallsMade(MpiCall::kCommCreateGroup);
  const std::int64_t freed = MpiCallsMade(MpiCall::kCommFree);
  BackendConformance(backend, rank(), size()).SetsComeAndGo();
  EXPECT_GT(MpiCallsMade(MpiCall::kCommCreateGroup), made);
  EXPECT_EQ(MpiCallsMade(MpiCall::kCommFree) - freed,
            MpiCallsMade(MpiCall::kCommCreateGroup) - made);
}

TEST_F(MpiBackendTest, TheWorldIsNotRemoved) {
  Backend backend(*communicators_, {});
  EXPECT_EQ(backend.RemoveSet(core::kWorldSet).code(), StatusCode::kInvalidArgument);
  float value = 1.0F;
  EXPECT_TRUE(Finish(backend.AllReduce(kSmall, &value, 1, DType::kF32, core::ReduceOp::kSum)).ok());
}

// A message that a session did not take does not come up in the next one, though MPI still has it.
TEST_F(MpiBackendTest, AMessageThatNobodyTookStaysInItsSession) {
  if (size() == 1) GTEST_SKIP() << "alone, MPICH keeps no message that nobody receives";
  static const int late = 1;  // MPI has the first one for ever
  static const int next = 2;
  const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
  int taken = 0;
  {
    Backend backend(*communicators_, {});
    ASSERT_TRUE(Finish(backend.SendMessage((rank() + 1) % size(), 5, &late, sizeof(late))).ok());
    auto unwanted = backend.ReceiveMessage(rank(), 6, &taken, sizeof(taken));
    EXPECT_FALSE(unwanted->Poll());
  }
  EXPECT_FALSE(Environment::HasFault());  // the receive was withdrawn
  communicators_.reset();
  ASSERT_TRUE(Communicators::Make(*environment_, deadline, &communicators_).ok());
  Backend backend(*communicators_, {});
  auto receive = backend.ReceiveMessage((rank() + size() - 1) % size(), 5, &taken, sizeof(taken));
  ASSERT_TRUE(Finish(backend.SendMessage((rank() + 1) % size(), 5, &next, sizeof(next))).ok());
  ASSERT_TRUE(Finish(std::move(receive)).ok());
  EXPECT_EQ(taken, 2);
}

TEST_F(MpiBackendTest, UnknownSetIsAnError) {
  Backend backend(*communicators_, {});
  float value = 1.0F;
  const Status status =
      Finish(backend.AllReduce({77, Lane::kSmall}, &value, 1, DType::kF32, core::ReduceOp::kSum));
  EXPECT_EQ(status.code(), StatusCode::kBackend);
  EXPECT_NE(status.message().find("process set 77, small lane"), std::string::npos)
      << status.ToString();
}

TEST_F(MpiBackendTest, TypeWithoutArithmeticIsAnError) {
  Backend backend(*communicators_, {});
  std::uint16_t value = 0;
  const Status status =
      Finish(backend.AllReduce(kSmall, &value, 1, DType::kBF16, core::ReduceOp::kSum));
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("bfloat16"), std::string::npos) << status.ToString();
}

// ---- failures of MPI, ordered on every rank alike ----

struct FailureCase {
  const char* name;
  MpiCall call;
  Channel channel;
};

TEST_F(MpiBackendTest, FailureOfAnyCallEndsItsOperationWithMpisWords) {
  Backend backend(*communicators_, {});
  const FailureCase cases[] = {
      {"MPI_Iallreduce", MpiCall::kIallreduce, kSmall},
      {"MPI_Allreduce", MpiCall::kAllreduce, kLarge},
      {"MPI_Ireduce", MpiCall::kIreduce, kSmall},
      {"MPI_Reduce", MpiCall::kReduce, kLarge},
      {"MPI_Ibcast", MpiCall::kIbcast, kSmall},
      {"MPI_Bcast", MpiCall::kBcast, kLarge},
      {"MPI_Iallgather", MpiCall::kIallgather, kSmall},
      {"MPI_Allgather", MpiCall::kAllgather, kLarge},
      {"MPI_Iallgatherv", MpiCall::kIallgatherv, kSmall},
      {"MPI_Allgatherv", MpiCall::kAllgatherv, kLarge},
      {"MPI_Ialltoall", MpiCall::kIalltoall, kSmall},
      {"MPI_Alltoall", MpiCall::kAlltoall, kLarge},
  };
  for (const FailureCase& failure : cases) {
    SCOPED_TRACE(failure.name);
    FailMpi(failure.call, MPI_ERR_INTERN);
    std::vector<float> values(4 * static_cast<std::size_t>(size()), 1.0F);
    std::vector<float> all(4 * static_cast<std::size_t>(size()));
    const std::vector<std::int64_t> bytes(static_cast<std::size_t>(size()), 16);
    std::unique_ptr<ops::Completion> operation;
    switch (failure.call) {
      case MpiCall::kIallreduce:
      case MpiCall::kAllreduce:
        operation =
            backend.AllReduce(failure.channel, values.data(), 4, DType::kF32, core::ReduceOp::kSum);
        break;
      case MpiCall::kIreduce:
      case MpiCall::kReduce:
        operation =
            backend.Reduce(failure.channel, values.data(), 4, DType::kF32, core::ReduceOp::kSum, 0);
        break;
      case MpiCall::kIbcast:
      case MpiCall::kBcast:
        operation = backend.Broadcast(failure.channel, values.data(), 16, 0);
        break;
      case MpiCall::kIallgather:
      case MpiCall::kAllgather:
        operation = backend.AllGather(failure.channel, values.data(), all.data(), 16);
        break;
      case MpiCall::kIalltoall:
      case MpiCall::kAlltoall:
        operation = backend.AllToAll(failure.channel, values.data(), all.data(), 16);
        break;
      default:
        operation = backend.AllGatherV(failure.channel, values.data(), all.data(), bytes);
    }
    const Status status = Finish(std::move(operation));
    EXPECT_EQ(status.code(), StatusCode::kBackend);
    EXPECT_EQ(status.message().find(std::string(failure.name) + ": "), 0U) << status.ToString();
    tests::MendMpi();
  }
}

TEST_F(MpiBackendTest, FailureOfASendOrReceiveNamesTheMember) {
  Backend backend(*communicators_, {});
  static float values[2] = {1.0F, 2.0F};  // MPI goes on with them
  FailMpi(MpiCall::kIsend, MPI_ERR_INTERN);
  Status status = Finish(backend.SendMessage(rank(), 1, values, 4));
  EXPECT_EQ(status.message().find("MPI_Isend to member " + std::to_string(rank()) + ": "), 0U)
      << status.ToString();
  tests::MendMpi();
  FailMpi(MpiCall::kIrecv, MPI_ERR_INTERN);
  status = Finish(backend.ReceiveMessage(rank(), 1, values, 4));
  EXPECT_EQ(status.message().find("MPI_Irecv from member " + std::to_string(rank()) + ": "), 0U)
      << status.ToString();
  tests::MendMpi();
  FailMpi(MpiCall::kTest, MPI_ERR_INTERN);
  status = Finish(backend.ReceiveMessage(rank(), 2, values, 4));
  EXPECT_EQ(status.message().find("MPI_Irecv from member " + std::to_string(rank()) + ": "), 0U)
      << status.ToString();
  tests::MendMpi();
  FailMpi(MpiCall::kWait, MPI_ERR_INTERN);
  const int next = (rank() + 1) % size();
  const int previous = (rank() + size() - 1) % size();
  const ops::OutgoingSlice outgoing{next, values, 4};
  const ops::IncomingSlice incoming{previous, values + 1, 4};
  if (size() == 1) return;
  status = Finish(backend.Exchange(kLarge, {&outgoing, 1}, {&incoming, 1}));
  EXPECT_EQ(status.message().find("MPI_Irecv from member " + std::to_string(previous) + ": "), 0U)
      << status.ToString();
}

TEST_F(MpiBackendTest, AMessageOfAnotherLengthIsAnErrorOfTheReceive) {
  if (size() == 1) GTEST_SKIP() << "alone, MPICH keeps no message that nobody receives";
  Backend backend(*communicators_, {});
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

TEST_F(MpiBackendTest, FailureInTheMiddleStartsNoFurtherCall) {
  BackendOptions options;
  options.max_call_bytes = 4;
  Backend backend(*communicators_, options);
  for (const bool blocking : {false, true}) {
    const MpiCall call = blocking ? MpiCall::kAllreduce : MpiCall::kIallreduce;
    const std::int64_t before = MpiCallsMade(call);
    FailMpi(call, MPI_ERR_INTERN, /*skip=*/2);
    std::vector<float> values(10, 1.0F);
    const Status status = Finish(backend.AllReduce(blocking ? kLarge : kSmall, values.data(), 10,
                                                   DType::kF32, core::ReduceOp::kSum));
    EXPECT_EQ(status.code(), StatusCode::kBackend);
    EXPECT_EQ(MpiCallsMade(call), before + 3);
    tests::MendMpi();
  }
}

TEST_F(MpiBackendTest, FailureWhilePollingIsReturned) {
  Backend backend(*communicators_, {});
  static float value = 1.0F;  // MPI goes on with it
  auto operation = backend.AllReduce(kSmall, &value, 1, DType::kF32, core::ReduceOp::kSum);
  FailMpi(MpiCall::kTest, MPI_ERR_INTERN);
  EXPECT_TRUE(operation->Poll());
  EXPECT_EQ(operation->status().code(), StatusCode::kBackend);
  EXPECT_EQ(operation->status().message().find("MPI_Test of MPI_Iallreduce: "), 0U)
      << operation->status().ToString();
}

TEST_F(MpiBackendTest, NothingStartsAfterAbort) {
  Backend backend(*communicators_, {});
  backend.Abort({StatusCode::kPeerLost, "rank 1 is gone"});
  backend.Abort({StatusCode::kAborted, "later"});
  const std::int64_t before =
      MpiCallsMade(MpiCall::kIallreduce) + MpiCallsMade(MpiCall::kAllreduce);
  float value = 1.0F;
  for (const Channel channel : {kSmall, kLarge}) {
    const Status status =
        Finish(backend.AllReduce(channel, &value, 1, DType::kF32, core::ReduceOp::kSum));
    EXPECT_EQ(status.message(), "rank 1 is gone");
  }
  EXPECT_EQ(MpiCallsMade(MpiCall::kIallreduce) + MpiCallsMade(MpiCall::kAllreduce), before);
  const std::int64_t sends = MpiCallsMade(MpiCall::kIsend) + MpiCallsMade(MpiCall::kIrecv);
  EXPECT_EQ(Finish(backend.SendMessage(rank(), 0, &value, 4)).message(), "rank 1 is gone");
  EXPECT_EQ(Finish(backend.ReceiveMessage(rank(), 0, &value, 4)).message(), "rank 1 is gone");
  EXPECT_EQ(backend.AddSet(5, {0}).message(), "rank 1 is gone");
  EXPECT_EQ(MpiCallsMade(MpiCall::kIsend) + MpiCallsMade(MpiCall::kIrecv), sends);
}

}  // namespace
}  // namespace sirtaki::mpi
