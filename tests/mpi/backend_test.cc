// RANKS: 1 2 3 4
// The MPI backend keeps what ops/backend.h promises, in every way of calling MPI.
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
  options.max_call_bytes = 1000;
  ExpectConforms(options);
}

TEST_F(MpiBackendTest, ConformsInManyCallsSerialized) {
  BackendOptions options;
  options.max_call_bytes = 1000;
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
}

}  // namespace
}  // namespace sirtaki::mpi
