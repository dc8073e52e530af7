// RANKS: 2 3
// A session keeps the process to one thread in MPI at a time, whatever it does.
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "mpi/gate.h"
#include "session/session.h"
#include "tests/support/mpi_interpose.h"
#include "tests/support/mpi_main.h"
#include "tests/support/session_calls.h"
#include "tests/support/within.h"

namespace sirtaki::session {
namespace {

using core::OpKind;
using core::Status;
using core::StatusCode;
using core::TimePoint;
using tests::Vector;

void ExpectSum(Session& session, std::size_t count) {
  Vector sum(OpKind::kAllReduce, "sum", std::vector<float>(count, 2.0F));
  const Status status = sum.Run(session);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(sum.values().back(), 2 * static_cast<float>(session.topology().size));
}

// Calls of the program's own in a pause: the library's threads are out of MPI.
void CallMpiInAPause(Session& session) {
  const Status paused = session.PauseMedium(TimePoint::max());
  ASSERT_TRUE(paused.ok()) << paused.ToString();
  tests::WatchGate(nullptr);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(tests::TrueOnAllRanks(true));
  tests::WatchGate(&mpi::Gate());
}

// Everything that a session does with MPI, on every path; small and large operations are under way
// while messages are.
void ExpectOneThreadInMpi(const StartOptions& options, bool by_hosts = false) {
  tests::SlowMpi(std::chrono::microseconds(20));
  tests::WatchGate(&mpi::Gate());
  std::shared_ptr<Session> session;
  const Status started = Session::CreateMpi(options, &session);
  ASSERT_TRUE(started.ok()) << started.ToString();
  EXPECT_EQ(session->description().find("hierarchical") != std::string::npos, by_hosts);
  const int size = session->topology().size;
  const int rank = session->topology().rank;
  std::vector<Vector> messages;
  for (int round = 0; round < 3; ++round) {
    Vector large(OpKind::kAllReduce, "large", std::vector<float>(std::size_t{1} << 20, 1.0F));
    Vector small(OpKind::kAllReduce, "small", {1.0F, 2.0F});
    Vector from_all(OpKind::kAllGather, "rows", std::vector<float>(3000, 1.0F));
    Vector root(OpKind::kBroadcast, "root", std::vector<float>(std::size_t{1} << 18, 2.0F), 0);
    ASSERT_TRUE(large.Submit(*session).ok());
    ASSERT_TRUE(small.Submit(*session).ok());
    ASSERT_TRUE(from_all.Submit(*session).ok());
    ASSERT_TRUE(root.Submit(*session).ok());
    for (Vector* vector : {&large, &small, &from_all, &root}) {
      const Status status = vector->Synchronize(*session);
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
    EXPECT_EQ(large.values().back(), static_cast<float>(size));
  }
  const TimePoint deadline = core::Clock::now() + std::chrono::seconds(60);
  core::SetNumber set = 0;
  ASSERT_TRUE(session->AddSet(core::RankRanges::Span(0, size - 1), deadline, &set).ok());
  Vector in_set(OpKind::kAllReduce, "in set", std::vector<float>(std::size_t{1} << 18, 1.0F), -1,
                set);
  ASSERT_TRUE(in_set.Submit(*session).ok());
  int handle = 0;
  ASSERT_TRUE(session->MakeCommunicator(set, deadline, &handle).ok());
  ASSERT_NO_FATAL_FAILURE(CallMpiInAPause(*session));
  Vector meanwhile(OpKind::kAllReduce, "meanwhile", {1.0F});
  ASSERT_TRUE(meanwhile.Submit(*session).ok());
  ASSERT_TRUE(session->ResumeMedium(deadline).ok());
  ASSERT_TRUE(meanwhile.Synchronize(*session).ok());
  ASSERT_TRUE(in_set.Synchronize(*session).ok());
  ASSERT_TRUE(session->RemoveSet(set, deadline).ok());
  for (const OpKind kind : {OpKind::kSend, OpKind::kReceive}) {
    messages.emplace_back(kind, "", std::vector<float>(std::size_t{1} << 18, 3.0F));
    core::Work& work = messages.back().work();
    const int step = kind == OpKind::kSend ? 1 : size - 1;
    work.peer = (rank + step) % size;
    ASSERT_TRUE(messages.back().Submit(*session).ok());
  }
  ExpectSum(*session, std::size_t{1} << 20);
  for (Vector& message : messages) ASSERT_TRUE(message.Synchronize(*session).ok());
  const Status ended = session->Shutdown("done");
  EXPECT_TRUE(ended.ok()) << ended.ToString();
  session.reset();
  tests::SlowMpi(std::chrono::microseconds(0));
  tests::WatchGate(nullptr);
  EXPECT_EQ(tests::MpiCallsOutsideGate(), 0);
  EXPECT_EQ(tests::MpiCallsBesideOthers(), 0);
  MPI_Comm made = MPI_Comm_f2c(handle);
  MPI_Comm_free(&made);
}

// It fails if any call of ours goes round the gate.
TEST(SessionMpiGateTest, OneThreadAtATimeIsInMpi) {
  ExpectOneThreadInMpi(tests::SessionOptions());
  ExpectOneThreadInMpi(tests::SessionOptions(
      [](core::Config& config) { config.shared_memory = core::SharedMemoryMode::kOff; }));
  ExpectOneThreadInMpi(tests::SessionOptions([](core::Config& config) {
    config.shared_memory = core::SharedMemoryMode::kOff;
    config.verify_transfers = true;
  }));
  ExpectOneThreadInMpi(tests::SessionOptions(
      [](core::Config& config) { config.transport = core::TransportMode::kMpi; }));
  // Where two ranks are on one host and a third is on another, large all-reduces go by hosts.
  tests::PretendHost(tests::WorldRank() < 2 ? "one" : "other");
  ExpectOneThreadInMpi(tests::SessionOptions(), /*by_hosts=*/tests::WorldSize() == 3);
  tests::PretendHost("");
}

// A rank leaves its MPI to the program for too long. The library says what keeps it out.
TEST(SessionMpiGateTest, AnMpiGateThatIsKeptIsNamed) {
  std::shared_ptr<Session> session;
  StartOptions options = tests::SessionOptions();
  options.config.transport = core::TransportMode::kMpi;
  options.config.peer_timeout = std::chrono::seconds(3);     // stuck after 10 s
  options.config.ping_interval = std::chrono::seconds(120);  // and nobody is lost meanwhile
  const Status started = Session::CreateMpi(options, &session);
  ASSERT_TRUE(started.ok()) << started.ToString();
  ASSERT_NO_FATAL_FAILURE(ExpectSum(*session, 1));
  ASSERT_TRUE(tests::TrueOnAllRanks(true));
  const bool keeps = session->topology().rank == 0;
  if (keeps) {
    core::Gate* gate = nullptr;
    ASSERT_TRUE(session->EnterMedium(&gate).ok());
    std::thread waits([&] {
      Vector sum(OpKind::kAllReduce, "sum", {1.0F});
      const Status status = sum.Run(*session);
      EXPECT_NE(status.message().find("stuck in one call for 10 s (an MpiGate of the program)"),
                std::string::npos)
          << status.ToString();
    });
    EXPECT_TRUE(tests::Within(std::chrono::seconds(100), [&] { return !session->fault().ok(); }));
    gate->Unlock();
    waits.join();
  }
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
  if (!keeps) session->Abort("a rank that is stuck tells nobody");
  EXPECT_FALSE(session->Shutdown("the test is over").ok());
  session.reset();
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
}

// A thread aborts the session while another one is in the pause; what follows goes through the gate.
TEST(SessionMpiGateTest, OneThreadAtATimeIsInMpiWhenAPauseIsAborted) {
  for (const core::TransportMode transport :
       {core::TransportMode::kAuto, core::TransportMode::kMpi}) {
    const std::int64_t beside_others = tests::MpiCallsBesideOthers();  // the test's own
    tests::SlowMpi(std::chrono::microseconds(20));
    tests::WatchGate(&mpi::Gate());
    std::shared_ptr<Session> session;
    const Status started = Session::CreateMpi(
        tests::SessionOptions([&](core::Config& config) { config.transport = transport; }),
        &session);
    ASSERT_TRUE(started.ok()) << started.ToString();
    ASSERT_NO_FATAL_FAILURE(CallMpiInAPause(*session));
    std::thread aborts([&] {
      if (session->topology().rank == 0) session->Abort("enough");
    });
    aborts.join();
    const Status resumed = session->ResumeMedium(TimePoint::max());
    EXPECT_EQ(resumed.code(), StatusCode::kAborted) << resumed.ToString();
    EXPECT_EQ(session->Shutdown("done").code(), StatusCode::kAborted);
    session.reset();
    tests::SlowMpi(std::chrono::microseconds(0));
    tests::WatchGate(nullptr);
    EXPECT_EQ(tests::MpiCallsOutsideGate(), 0);
    EXPECT_EQ(tests::MpiCallsBesideOthers(), beside_others);
    EXPECT_TRUE(tests::TrueOnAllRanks(true));
  }
}

}  // namespace
}  // namespace sirtaki::session
