#include "tcp/transport.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "tests/support/rank_threads.h"
#include "tests/support/transport_conformance.h"
#include "tests/tcp/lines.h"

namespace sirtaki::tcp {
namespace {

using core::Bytes;
using core::Clock;
using core::Status;
using core::StatusCode;
using std::chrono::milliseconds;
using std::chrono::seconds;

class TcpTransportConformanceTest : public ::testing::TestWithParam<int> {};

TEST_P(TcpTransportConformanceTest, PassesEveryCheckOfATransport) {
  const int size = GetParam();
  auto lines = tests::LinesOfAll(size);
  tests::RankThreads::Run(size, [&](int rank) {
    Transport transport(rank, std::move(lines[static_cast<std::size_t>(rank)]),
                        tests::HostsOf(size));
    tests::TransportConformance conformance(transport, rank, size);
    for (const tests::TransportCheck& check : tests::kTransportChecks) {
      SCOPED_TRACE(check.name);
      tests::RankThreads::Note(check.name);
      (conformance.*check.run)();
    }
    transport.SayFarewell();
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, TcpTransportConformanceTest, ::testing::Values(1, 2, 3, 4));

class TcpTransportTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto lines = tests::LinesOfAll(2);
    for (int rank = 0; rank < 2; ++rank) {
      ranks_[rank] = std::make_unique<Transport>(
          rank, std::move(lines[static_cast<std::size_t>(rank)]), tests::HostsOf(2));
    }
  }

  // Until rank 0 says that something is wrong, or 30 s.
  Status AwaitFailure() {
    const auto deadline = Clock::now() + seconds(30);
    while (ranks_[0]->health().ok() && Clock::now() < deadline) {
      static_cast<void>(ranks_[0]->TryReceive());
      std::this_thread::sleep_for(milliseconds(1));
    }
    return ranks_[0]->health();
  }

  std::unique_ptr<Transport> ranks_[2];
};

TEST_F(TcpTransportTest, AConnectionThatEndsIsALossThatNamesTheRankAndItsHost) {
  ranks_[1]->Send(0, Bytes(3));
  const auto before = Clock::now();
  ranks_[1].reset();
  // What it had said before arrives.
  const auto incoming = ranks_[0]->TryReceive();
  ASSERT_TRUE(incoming.has_value());
  EXPECT_EQ(incoming->bytes.size(), 3U);
  static_cast<void>(ranks_[0]->TryReceive());
  const Status lost = AwaitFailure();
  EXPECT_EQ(lost.code(), StatusCode::kPeerLost);
  EXPECT_EQ(lost.message(), "rank 1 is lost: its connection from host host1 was closed");
  EXPECT_EQ(lost.origin().rank, 1);
  EXPECT_GE(Clock::now() - before, kGrace);
  ranks_[0]->Send(1, Bytes(1));  // goes nowhere
  EXPECT_TRUE(ranks_[0]->Flush());
}

TEST_F(TcpTransportTest, AnEndThatWasAnnouncedIsNoLoss) {
  std::thread other([this] {
    ranks_[1]->Send(0, Bytes(3));
    ranks_[1]->SayFarewell();
    ranks_[1].reset();
  });
  while (!ranks_[0]->TryReceive()) std::this_thread::yield();
  // The other end waits for this one's farewell, and goes at last without.
  other.join();
  const auto until = Clock::now() + 2 * kGrace;
  while (Clock::now() < until) static_cast<void>(ranks_[0]->TryReceive());
  EXPECT_TRUE(ranks_[0]->health().ok()) << ranks_[0]->health().ToString();
}

// A child may outlive its parent, as the workers of a data loader do.
TEST_F(TcpTransportTest, AForkedChildDoesNotKeepTheConnectionOpen) {
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(ends[1]);
    char byte = 0;
    _exit(read(ends[0], &byte, 1) == 0 ? 0 : 1);  // until the parent lets it
  }
  ranks_[1].reset();
  EXPECT_EQ(AwaitFailure().code(), StatusCode::kPeerLost);
  close(ends[1]);
  close(ends[0]);
  int ended = 1;
  EXPECT_EQ(waitpid(child, &ended, 0), child);
  EXPECT_EQ(ended, 0);
}

// A message that nobody has read, on its way the other way, must not take along what was sent.
TEST_F(TcpTransportTest, NothingIsLostWhereBothSayFarewellAtOnce) {
  for (int round = 0; round < 50; ++round) {
    SetUp();
    ranks_[0]->Send(1, Bytes(100));
    ranks_[1]->Send(0, Bytes(200'000));
    std::thread other([this] {
      ranks_[1]->SayFarewell();
      ranks_[1].reset();
    });
    std::optional<core::Incoming> incoming;
    while (ranks_[0]->health().ok() && !incoming) incoming = ranks_[0]->TryReceive();
    ranks_[0]->SayFarewell();
    ranks_[0].reset();
    other.join();
    ASSERT_TRUE(incoming.has_value());
    ASSERT_EQ(incoming->bytes.size(), 200'000U);
  }
}

}  // namespace
}  // namespace sirtaki::tcp
