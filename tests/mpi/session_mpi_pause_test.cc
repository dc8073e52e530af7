// RANKS: 2 3 4
// Something ends the job while its ranks pause, or meet for a communicator. No rank waits for
// stall_limit: it is half an hour here, and a test that hangs is ended by its watchdog.
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "session/session.h"
#include "tests/support/mpi_interpose.h"
#include "tests/support/mpi_main.h"
#include "tests/support/session_calls.h"

namespace sirtaki::session {
namespace {

using core::Status;
using core::StatusCode;
using core::TimePoint;
using tests::MpiCall;

// The engines talk over MPI, or in shared memory: then the next receive by MPI is a meeting's.
class SessionMpiPauseTest : public testing::TestWithParam<core::TransportMode> {
 protected:
  void SetUp() override {
    StartOptions options = tests::SessionOptions();
    options.config.transport = GetParam();
    options.config.stall_limit = std::chrono::minutes(30);
    Change(options.config);
    const Status status = Session::CreateMpi(options, &session_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ASSERT_TRUE(tests::TrueOnAllRanks(true));
  }

  virtual void Change(core::Config& /*config*/) const {}

  void TearDown() override {
    static_cast<void>(session_->Shutdown("the test is over"));
    session_.reset();
    tests::MendMpi();
    EXPECT_TRUE(tests::TrueOnAllRanks(true));
  }

  bool IsLast() const { return session_->topology().rank == session_->topology().size - 1; }
  std::string Last() const { return "rank " + std::to_string(session_->topology().size - 1); }

  void ExpectFault(const Status& status, StatusCode code, const std::string& part) const {
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_NE(status.ToString().find(part), std::string::npos) << status.ToString();
    EXPECT_EQ(status.origin().rank, session_->topology().size - 1) << status.ToString();
  }

  std::shared_ptr<Session> session_;
};

INSTANTIATE_TEST_SUITE_P(Ways, SessionMpiPauseTest,
                         testing::Values(core::TransportMode::kAuto, core::TransportMode::kMpi),
                         [](const auto& of) {
                           return std::string(of.param == core::TransportMode::kMpi ? "AllMpi"
                                                                                    : "Auto");
                         });

TEST_P(SessionMpiPauseTest, AnAbortInAPauseIsWhatTheOthersResumeTo) {
  ASSERT_TRUE(session_->PauseMedium(TimePoint::max()).ok());
  ASSERT_TRUE(tests::TrueOnAllRanks(true));  // all of them have paused
  if (IsLast()) session_->Abort("this sample cannot be read");
  ExpectFault(session_->ResumeMedium(TimePoint::max()), StatusCode::kAborted,
              "this sample cannot be read");
}

TEST_P(SessionMpiPauseTest, ARankThatLeavesInAPauseIsNamedWhenTheOthersResume) {
  ASSERT_TRUE(session_->PauseMedium(TimePoint::max()).ok());
  if (IsLast()) {
    EXPECT_TRUE(session_->Shutdown("had enough").ok());
    return;
  }
  const Status status = session_->ResumeMedium(TimePoint::max());
  EXPECT_EQ(status.code(), StatusCode::kShutDown) << status.ToString();
  EXPECT_NE(status.message().find(Last() + " has shut down: had enough"), std::string::npos)
      << status.ToString();
  // The others are in step, and end in order.
  EXPECT_TRUE(session_->Shutdown("done").ok());
}

// A thread waits for the last rank to resume while others shut the session down.
TEST_P(SessionMpiPauseTest, AShutdownOfAllEndsAResumption) {
  ASSERT_TRUE(session_->PauseMedium(TimePoint::max()).ok());
  std::thread resumes([&] {
    const bool refused = IsLast() || !session_->ResumeMedium(TimePoint::max()).ok();
    EXPECT_TRUE(refused);
  });
  EXPECT_TRUE(session_->Shutdown("done").ok());
  resumes.join();
}

// Over MPI it might be the engine that receives next, which is another error.
class SessionMpiMeetingTest : public SessionMpiPauseTest {};

INSTANTIATE_TEST_SUITE_P(Ways, SessionMpiMeetingTest, testing::Values(core::TransportMode::kAuto),
                         [](const auto&) { return std::string("Auto"); });

TEST_P(SessionMpiMeetingTest, ARankWhoseMpiFailsInAPauseTellsTheOthers) {
  if (IsLast()) tests::FailMpi(MpiCall::kIrecv, MPI_ERR_INTERN);
  ExpectFault(session_->PauseMedium(TimePoint::max()), StatusCode::kBackend, "MPI_Irecv from rank");
}

TEST_P(SessionMpiMeetingTest, ARankWhoseMpiFailsInTheMeetingForACommunicatorTellsTheOthers) {
  if (IsLast()) tests::FailMpi(MpiCall::kIrecv, MPI_ERR_INTERN);
  int handle = 0;
  ExpectFault(session_->MakeCommunicator(core::kWorldSet, TimePoint::max(), &handle),
              StatusCode::kBackend, "MPI_Irecv from rank");
}

// An engine is called stuck after 10 s, but a rank that a busy machine holds up is not lost.
class SessionMpiCommunicatorTest : public SessionMpiPauseTest {
  void Change(core::Config& config) const override {
    config.peer_timeout = std::chrono::seconds(3);
    config.ping_interval = std::chrono::seconds(120);
  }
};

INSTANTIATE_TEST_SUITE_P(Ways, SessionMpiCommunicatorTest,
                         testing::Values(core::TransportMode::kAuto),
                         [](const auto&) { return std::string("Auto"); });

// The last rank alone does not take part, so MPI keeps the others in a call that blocks.
TEST_P(SessionMpiCommunicatorTest, ARankWhoseMpiCannotMakeItIsAnErrorOnEveryRank) {
  tests::MissGroupOn(session_->topology().size - 1);
  int handle = 0;
  const Status status = session_->MakeCommunicator(core::kWorldSet, TimePoint::max(), &handle);
  if (IsLast()) {
    ExpectFault(status, StatusCode::kBackend, "MPI_Comm_create_group: ");
  } else {
    EXPECT_NE(status.ToString().find("stuck in one call for 10 s (MPI_Comm_create_group)"),
              std::string::npos)
        << status.ToString();
  }
  EXPECT_FALSE(session_->Shutdown("the test is over").ok());
  ASSERT_TRUE(tests::TrueOnAllRanks(true));  // all of them have their error
  if (IsLast()) tests::MakeMissedGroup();
}

// The others have their communicator, and the fault with their next call.
TEST_P(SessionMpiCommunicatorTest, ARankWhoseMpiSaysThatItFailedTellsTheOthers) {
  if (IsLast()) {
    tests::FailMpi(MpiCall::kCommCreateGroup, MPI_ERR_INTERN, 0, tests::MpiFailure::kAfter);
  }
  int handle = 0;
  Status status = session_->MakeCommunicator(core::kWorldSet, TimePoint::max(), &handle);
  EXPECT_EQ(status.ok(), !IsLast()) << status.ToString();
  if (status.ok()) {
    tests::Vector next(core::OpKind::kAllReduce, "next", {1.0F});
    status = next.Run(*session_);
  }
  ExpectFault(status, StatusCode::kBackend, "MPI_Comm_create_group: ");
}

// The last rank stays in its pause.
TEST_P(SessionMpiPauseTest, ARankThatDoesNotResumeInTimeIsNamed) {
  ASSERT_TRUE(session_->PauseMedium(TimePoint::max()).ok());
  if (!IsLast()) {
    const Status status =
        session_->ResumeMedium(core::Clock::now() + std::chrono::milliseconds(200));
    EXPECT_EQ(status.code(), StatusCode::kTimedOut) << status.ToString();
    EXPECT_NE(status.message().find("not submitted by " + Last()), std::string::npos)
        << status.ToString();
  }
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
}

}  // namespace
}  // namespace sirtaki::session
