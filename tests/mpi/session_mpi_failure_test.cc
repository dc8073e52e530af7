// RANKS: 2 4
// One rank's MPI fails: every rank learns of it, and why. Each test leaves the world as after a
// failure, so it takes new communicators for each session.
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <memory>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "session/session.h"
#include "tests/support/mpi_interpose.h"
#include "tests/support/mpi_main.h"
#include "tests/support/session_calls.h"

namespace sirtaki::session {
namespace {

using core::OpKind;
using core::Status;
using core::StatusCode;
using std::chrono::milliseconds;
using tests::FailMpi;
using tests::MpiCall;
using tests::Vector;

// What goes wrong.
struct Failure {
  const char* name;
  MpiCall call;
  std::size_t elements;  // of the all-reduce that meets it
  tests::MpiFailure failure = tests::MpiFailure::kInstead;
};

class SessionMpiFailureTest : public testing::TestWithParam<Failure> {
 protected:
  void SetUp() override {
    StartOptions options = tests::SessionOptions();
    options.config.ping_interval = milliseconds(200);
    options.config.peer_timeout = std::chrono::seconds(12);
    options.config.shared_memory = core::SharedMemoryMode::kOff;  // all of it goes over MPI
    options.config.verify_transfers = Verifies();
    const Status status = Session::CreateMpi(options, &session_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    Vector vector(OpKind::kAllReduce, "before", {1.0F});
    ASSERT_TRUE(vector.Run(*session_).ok());
    ASSERT_TRUE(tests::TrueOnAllRanks(true));
  }

  void TearDown() override {
    EXPECT_FALSE(session_->Shutdown("the test is over").ok());
    session_.reset();
    tests::MendMpi();
    EXPECT_TRUE(tests::TrueOnAllRanks(true));
  }

  virtual bool Verifies() const { return false; }

  // A call or two may still go through: the failure is in what MPI is used for next.
  Status ReduceUntilAnError(std::size_t elements) {
    Status status;
    const auto deadline = core::Clock::now() + std::chrono::seconds(60);
    for (int i = 0; status.ok() && core::Clock::now() < deadline; ++i) {
      Vector vector(OpKind::kAllReduce, "w" + std::to_string(i),
                    std::vector<float>(elements, 1.0F));
      status = vector.Run(*session_);
    }
    return status;
  }

  std::shared_ptr<Session> session_;
};

INSTANTIATE_TEST_SUITE_P(
    Calls, SessionMpiFailureTest,
    testing::Values(Failure{"MPI_Irecv", MpiCall::kIrecv, 1},
                    Failure{"MPI_Irecv", MpiCall::kIrecv, 1 << 18},
                    Failure{"MPI_Improbe", MpiCall::kImprobe, 1},
                    Failure{"MPI_Isend", MpiCall::kIsend, 1},
                    // Whichever request MPI_Test fails for, that one's call may be named.
                    Failure{"MPI_", MpiCall::kTest, 1, tests::MpiFailure::kAfter},
                    Failure{"MPI_", MpiCall::kTest, 1 << 18, tests::MpiFailure::kAfter}),
    [](const auto& failure) {
      return std::string(failure.param.name) + (failure.param.elements > 1 ? "_large" : "_small");
    });

// The last rank stays in its pause. The others say so, and do not wait for ever.
TEST(SessionMpiPauseTest, ARankThatDoesNotResumeIsMissedByTheOthers) {
  std::shared_ptr<Session> session;
  ASSERT_TRUE(Session::CreateMpi(tests::SessionOptions([](core::Config& config) {
                                   config.stall_warning = milliseconds(100);
                                   config.stall_limit = std::chrono::seconds(12);
                                 }),
                                 &session)
                  .ok());
  const core::TimePoint deadline = core::Clock::now() + std::chrono::seconds(60);
  ASSERT_TRUE(session->PauseMedium(deadline).ok());
  if (session->topology().rank < session->topology().size - 1) {
    const Status resumed = session->ResumeMedium(deadline);
    EXPECT_EQ(resumed.code(), StatusCode::kTimedOut) << resumed.ToString();
    for (const char* part : {"resumption of MPI", "longer than stall_limit"}) {
      EXPECT_NE(resumed.message().find(part), std::string::npos) << resumed.ToString();
    }
  }
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
  EXPECT_FALSE(session->Shutdown("the test is over").ok());
}

// Its session verifies.
class SessionMpiDamageTest : public SessionMpiFailureTest {
  bool Verifies() const override { return true; }
};

INSTANTIATE_TEST_SUITE_P(Sizes, SessionMpiDamageTest,
                         testing::Values(Failure{"small", MpiCall::kIsend, 1 << 10},
                                         Failure{"large", MpiCall::kIsend, 1 << 18}),
                         [](const auto& failure) { return std::string(failure.param.name); });

TEST_P(SessionMpiDamageTest, ChangedBytesEndTheSessionOnEveryRank) {
  const int last = session_->topology().size - 1;
  const auto elements = GetParam().elements;
  if (session_->topology().rank == last) tests::DamageMpi(1 << 12);
  const Status status = ReduceUntilAnError(elements);
  EXPECT_EQ(status.code(), StatusCode::kBackend);
  const std::string sent = " that rank " + std::to_string(last) + " sent to rank ";
  for (const std::string& part : {std::string("\"w0\""), sent}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
  // The last byte of a message was changed, so the range ends there.
  const std::string text = status.message();
  std::smatch range;
  ASSERT_TRUE(std::regex_search(
      text, range, std::regex("verify_transfers: bytes ([0-9]+)-([0-9]+) of ([0-9]+) that rank")))
      << text;
  EXPECT_EQ(std::stoll(range[2]) + 1, std::stoll(range[3])) << text;
  EXPECT_LE(std::stoll(range[3]) - std::stoll(range[1]), std::int64_t{64} << 10) << text;
}

TEST_P(SessionMpiFailureTest, EndsTheSessionOnEveryRank) {
  const int last = session_->topology().size - 1;
  const bool fails = session_->topology().rank == last;
  if (fails) FailMpi(GetParam().call, MPI_ERR_INTERN, /*skip=*/0, GetParam().failure);
  const Status status = ReduceUntilAnError(GetParam().elements);
  EXPECT_FALSE(status.ok());
  // The handle may be done a moment before the engine has heard of it.
  const auto deadline = core::Clock::now() + std::chrono::seconds(60);
  while (session_->fault().ok() && core::Clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(session_->fault().code(), status.code()) << session_->fault().ToString();
  // A rank whose collectives fail tells the others what MPI said; one that can send nothing any
  // more is lost to them.
  const bool can_tell = GetParam().call != MpiCall::kIsend;
  if (fails || can_tell) {
    EXPECT_EQ(status.code(), StatusCode::kBackend) << status.ToString();
    EXPECT_NE(status.ToString().find(GetParam().name), std::string::npos) << status.ToString();
    EXPECT_EQ(status.origin().rank, last) << status.ToString();
  } else {
    EXPECT_EQ(status.code(), StatusCode::kPeerLost) << status.ToString();
    EXPECT_NE(status.ToString().find("rank " + std::to_string(last)), std::string::npos)
        << status.ToString();
  }
}

}  // namespace
}  // namespace sirtaki::session
