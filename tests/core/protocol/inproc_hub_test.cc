#include "core/protocol/inproc_hub.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "tests/support/rank_threads.h"
#include "tests/support/transport_conformance.h"

namespace sirtaki::core {
namespace {

Bytes Text(char c) { return Bytes(1, static_cast<std::byte>(c)); }

class InprocHubConformanceTest : public ::testing::TestWithParam<int> {};

TEST_P(InprocHubConformanceTest, PassesEveryCheckOfATransport) {
  const int size = GetParam();
  InprocHub hub(size);
  tests::RankThreads::Run(size, [&](int rank) {
    const std::unique_ptr<Transport> transport = hub.Connect(rank);
    tests::TransportConformance conformance(*transport, rank, size);
    for (const tests::TransportCheck& check : tests::kTransportChecks) {
      SCOPED_TRACE(check.name);
      tests::RankThreads::Note(check.name);
      (conformance.*check.run)();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, InprocHubConformanceTest, ::testing::Values(1, 2, 3, 4));

TEST(InprocHubTest, AnIsolatedRankNeitherSendsNorReceives) {
  InprocHub hub(3);
  const auto zero = hub.Connect(0);
  const auto one = hub.Connect(1);
  const auto two = hub.Connect(2);
  hub.Isolate(1);
  zero->Send(1, Text('a'));
  one->Send(0, Text('b'));
  two->Send(0, Text('c'));
  EXPECT_FALSE(one->TryReceive().has_value());
  const std::optional<Incoming> message = zero->TryReceive();
  ASSERT_TRUE(message.has_value());
  EXPECT_EQ(message->from, 2);
  EXPECT_FALSE(zero->TryReceive().has_value());
  EXPECT_TRUE(one->health().ok());
}

TEST(InprocHubTest, ABrokenTransportSaysSoAndRings) {
  InprocHub hub(2);
  const auto zero = hub.Connect(0);
  const std::uint64_t ticket = zero->ArmDoorbell();
  const Status why(StatusCode::kBackend, "cable pulled");
  hub.Break(0, why);
  EXPECT_TRUE(zero->WaitUntil(ticket, Clock::now() + std::chrono::seconds(30)));
  EXPECT_EQ(zero->health(), why);
  hub.Break(0, Status(StatusCode::kBackend, "a later failure"));
  EXPECT_EQ(zero->health(), why);
}

TEST(InprocHubTest, MessagesWaitForARankThatConnectsLater) {
  InprocHub hub(2);
  hub.Connect(0)->Send(1, Text('x'));
  const auto one = hub.Connect(1);
  const std::optional<Incoming> message = one->TryReceive();
  ASSERT_TRUE(message.has_value());
  EXPECT_EQ(message->bytes, Text('x'));
}

}  // namespace
}  // namespace sirtaki::core
