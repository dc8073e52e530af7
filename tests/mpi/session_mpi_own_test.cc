// RANKS: 1 2 3
// Sessions where nobody has initialised MPI, and a program that just ends: without shutdown,
// without MPI_Finalize. The tests run in their order.
#include <gtest/gtest.h>
#include <mpi.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "session/session.h"
#include "tests/support/mpi_main.h"
#include "tests/support/session_calls.h"

namespace sirtaki::tests {
MpiStart WantedMpiStart() { return MpiStart::kNone; }
}  // namespace sirtaki::tests

namespace sirtaki::session {
namespace {

using core::OpKind;
using core::Status;
using core::StatusCode;
using tests::Vector;

pid_t main_process = 0;

// Registered before everything else, so it runs after it: after the session's end and MPI's.
void CheckTheEnd() {
  if (getpid() != main_process) return;
  int finalized = 0;
  MPI_Finalized(&finalized);
  const auto session = DefaultSession();
  const bool shut_down = session && session->Check().code() == StatusCode::kNotInitialized;
  if (finalized != 0 && shut_down && session->fault().ok()) return;
  std::printf("FAILED: at the exit MPI was %s and the session %s\n",
              finalized != 0 ? "finalized" : "not finalized",
              shut_down ? session->fault().ToString().c_str() : "not shut down");
  std::fflush(stdout);
  _exit(1);
}

void ExpectWorks(Session& session) {
  Vector vector(OpKind::kAllReduce, "w", {1.0F});
  const Status status = vector.Run(session);
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(vector.values().front(), static_cast<float>(session.topology().size));
}

TEST(SessionMpiOwnTest, InitialisesMpi) {
  main_process = getpid();
  std::atexit(CheckTheEnd);
  std::shared_ptr<Session> session;
  const Status status = Session::CreateMpi(tests::SessionOptions(), &session);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(session->topology().size, tests::WorldSize());
  ExpectWorks(*session);
  EXPECT_TRUE(session->Shutdown("done").ok());
}

TEST(SessionMpiOwnTest, MpiStaysInitialisedAfterShutdown) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  EXPECT_EQ(finalized, 0);
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
}

TEST(SessionMpiOwnTest, NextSessionIsEndedAtTheExitOfTheProcess) {
  std::shared_ptr<Session> session;
  const Status status = Session::CreateMpi(tests::SessionOptions(), &session);
  ASSERT_TRUE(status.ok()) << status.ToString();
  ExpectWorks(*session);
  SetDefaultSession(session);
}

TEST(SessionMpiOwnTest, InAForkedChildEveryCallFailsAndTheParentGoesOn) {
  const auto session = DefaultSession();
  ASSERT_NE(session, nullptr);
  const core::TimePoint deadline = core::Clock::now() + std::chrono::seconds(60);
  ASSERT_TRUE(session->PauseMedium(deadline).ok());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Vector vector(OpKind::kAllReduce, "w", {1.0F});
    const Status refused = vector.Submit(*session);
    const bool right = refused.code() == StatusCode::kNotInitialized &&
                       refused.message().find("after fork") != std::string::npos;
    std::shared_ptr<Session> own;
    const Status not_started = Session::CreateMpi(tests::SessionOptions(), &own);
    const bool right_too = not_started.code() == StatusCode::kNotInitialized &&
                           not_started.message().find("start it with exec") != std::string::npos;
    const Status resumed = session->ResumeMedium(deadline);
    const bool right_three = resumed.code() == StatusCode::kNotInitialized;
    std::exit(right && right_too && right_three
                  ? 0
                  : 1);  // with everything that is registered for the exit
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  ASSERT_TRUE(session->ResumeMedium(deadline).ok());
  ExpectWorks(*session);
}

}  // namespace
}  // namespace sirtaki::session
