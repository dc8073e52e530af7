// RANKS: 2 3
// How many threads a session uses MPI from, and what the ranks make of it where they differ.
#include <gtest/gtest.h>
#include <mpi.h>
#include <sys/resource.h>

#include <array>
#include <csignal>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "session/session.h"
#include "tests/support/mpi_main.h"
#include "tests/support/session_calls.h"

namespace sirtaki::session {
namespace {

using core::OpKind;
using core::Status;
using tests::Vector;

constexpr const char* kOneAtATime =
    "one thread at a time calls MPI, as Open MPI's ob1 can lose data";

bool IsOpenMpi() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  MPI_Get_library_version(text.data(), &length);
  return std::string(text.data()).starts_with("Open MPI");
}

void ExpectSum(Session& session, std::size_t count) {
  Vector sum(OpKind::kAllReduce, "sum", std::vector<float>(count, 2.0F));
  const Status status = sum.Run(session);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(sum.values().back(), 2 * static_cast<float>(tests::WorldSize()));
}

// Whether a session with these options says that one thread at a time calls MPI.
void ExpectOneAtATime(bool expected, const StartOptions& options) {
  std::shared_ptr<Session> session;
  const Status started = Session::CreateMpi(options, &session);
  ASSERT_TRUE(started.ok()) << started.ToString();
  EXPECT_EQ(session->description().find(kOneAtATime) != std::string::npos, expected)
      << session->description();
  for (const std::size_t count : {std::size_t{1}, std::size_t{1} << 20}) ExpectSum(*session, count);
  const Status ended = session->Shutdown("done");
  EXPECT_TRUE(ended.ok()) << ended.ToString();
}

TEST(SessionMpiMixedTest, OneThreadAtATimeCallsOb1WhereItCarriesData) {
  ExpectOneAtATime(false, tests::SessionOptions());
  ExpectOneAtATime(IsOpenMpi(), tests::SessionOptions([](core::Config& config) {
                     config.shared_memory = core::SharedMemoryMode::kOff;
                   }));
  ExpectOneAtATime(IsOpenMpi(), tests::SessionOptions([](core::Config& config) {
                     config.transport = core::TransportMode::kMpi;
                   }));
  ExpectOneAtATime(false, tests::SessionOptions([](core::Config& config) {
                     config.shared_memory = core::SharedMemoryMode::kOff;
                     config.mpi_threads = core::MpiThreads::kMultiple;
                   }));
}

// A rank that may make no file of any length has no memory to share.
TEST(SessionMpiMixedTest, OneThreadAtATimeCallsOb1WhereMemoryCannotBeShared) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  if (tests::WorldRank() == 1) {
    const rlimit none{0, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
  }
  ExpectOneAtATime(IsOpenMpi(), tests::SessionOptions());
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
}

TEST(SessionMpiMixedTest, OneSerializedRankMakesAllSerialized) {
  StartOptions options = tests::SessionOptions();
  const bool serialized = tests::WorldRank() == 1;
  if (serialized) options.config.mpi_threads = core::MpiThreads::kSerialized;
  std::shared_ptr<Session> session;
  const Status started = Session::CreateMpi(options, &session);
  ASSERT_TRUE(started.ok()) << started.ToString();

  const std::string why = serialized
                              ? "used as serialized (mpi_threads): both host lanes are non-blocking"
                              : "; serialized because rank 1 is: both host lanes are non-blocking";
  EXPECT_NE(session->description().find(why), std::string::npos) << session->description();

  for (const std::size_t count : {std::size_t{1}, std::size_t{1} << 20}) ExpectSum(*session, count);
  const Status ended = session->Shutdown("done");
  EXPECT_TRUE(ended.ok()) << ended.ToString();
}

}  // namespace
}  // namespace sirtaki::session
