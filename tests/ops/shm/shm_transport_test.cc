#include "ops/shm/transport.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/protocol/inproc_hub.h"
#include "tests/support/rank_threads.h"
#include "tests/support/test_scale.h"
#include "tests/support/transport_conformance.h"
#include "tests/support/within.h"

namespace sirtaki::ops::shm {
namespace {

using core::Bytes;
using core::Clock;
using core::Incoming;
using core::InprocHub;
using core::Status;
using core::StatusCode;

constexpr std::chrono::seconds kPatience{30};

Bytes Text(std::size_t size, char c) { return Bytes(size, static_cast<std::byte>(c)); }

// The ranks of some hosts, in one process.
class Hosts {
 public:
  explicit Hosts(const std::vector<int>& host_of_rank)
      : hub_(static_cast<int>(host_of_rank.size())), groups_(host_of_rank.size()) {
    std::vector<std::string> announcements(groups_.size());
    for (std::size_t rank = 0; rank < groups_.size(); ++rank) {
      LocalGroupOptions options;
      options.rank = static_cast<int>(rank);
      const Status made = LocalGroup::Make(options, &groups_[rank], &announcements[rank]);
      EXPECT_TRUE(made.ok()) << made.ToString();
    }
    for (std::size_t rank = 0; rank < groups_.size(); ++rank) {
      core::RankRanges here;
      std::vector<std::string> said;
      for (std::size_t other = 0; other < groups_.size(); ++other) {
        if (host_of_rank[other] != host_of_rank[rank]) continue;
        here.Add(static_cast<int>(other));
        said.push_back(announcements[other]);
      }
      const Status joined = groups_[rank]->Join(here, said);
      EXPECT_TRUE(joined.ok()) << joined.ToString();
      if (here.Count() < static_cast<std::int64_t>(groups_.size())) brought_ = Beyond::kMessages;
      beyond_.push_back(hub_.Connect(static_cast<int>(rank)));
    }
  }

  std::unique_ptr<Transport> Connect(int rank) { return Connect(rank, brought_); }
  std::unique_ptr<Transport> Connect(int rank, Beyond brought) {
    const auto at = static_cast<std::size_t>(rank);
    return std::make_unique<Transport>(*groups_[at], *beyond_[at], brought);
  }
  LocalGroup& group(int rank) { return *groups_[static_cast<std::size_t>(rank)]; }
  InprocHub& hub() { return hub_; }

 private:
  InprocHub hub_;
  std::vector<std::unique_ptr<LocalGroup>> groups_;
  std::vector<std::unique_ptr<core::Transport>> beyond_;
  Beyond brought_ = Beyond::kNone;
};

// The other end of a mailbox, in the hands of somebody who writes what no rank does.
MailboxWriter WriterTo(Hosts& hosts, int receiver, int sender) {
  const MailboxLayout layout(LocalGroup::kChannelsBegin - LocalGroup::kMailboxesBegin,
                             hosts.group(receiver).size());
  return {hosts.group(receiver).SessionMemory(receiver) + LocalGroup::kMailboxesBegin +
              layout.OffsetOf(sender),
          layout.capacity()};
}

MailboxHead& HeadOf(Hosts& hosts, int receiver, int sender) {
  const MailboxLayout layout(LocalGroup::kChannelsBegin - LocalGroup::kMailboxesBegin,
                             hosts.group(receiver).size());
  return *reinterpret_cast<MailboxHead*>(hosts.group(receiver).SessionMemory(receiver) +
                                         LocalGroup::kMailboxesBegin + layout.OffsetOf(sender));
}

class ShmTransportConformanceTest : public ::testing::TestWithParam<std::vector<int>> {};

TEST_P(ShmTransportConformanceTest, PassesEveryCheckOfATransport) {
  Hosts hosts(GetParam());
  const int size = static_cast<int>(GetParam().size());
  tests::RankThreads::Run(size, [&](int rank) {
    const std::unique_ptr<Transport> transport = hosts.Connect(rank);
    tests::TransportConformance conformance(*transport, rank, size);
    for (const tests::TransportCheck& check : tests::kTransportChecks) {
      SCOPED_TRACE(check.name);
      tests::RankThreads::Note(check.name);
      (conformance.*check.run)();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Hosts, ShmTransportConformanceTest,
                         ::testing::ValuesIn(tests::SampleOf<std::vector<int>>(::testing::Values(
                             std::vector<int>{0, 0}, std::vector<int>{0, 0, 0},
                             std::vector<int>{0, 0, 0, 0}, std::vector<int>{0, 1, 0, 1},
                             std::vector<int>{0, 0, 0, 1}))));

TEST(ShmTransportTest, OnlyARankThatListensBeyondItsHostHasToPoll) {
  Hosts one({0, 0});
  EXPECT_TRUE(one.Connect(0)->ArrivalsRing());
  Hosts two({0, 1});
  EXPECT_FALSE(two.Connect(0)->ArrivalsRing());
}

TEST(ShmTransportTest, AFaultFromBeyondArrivesThoughNobodyPollsForIt) {
  Hosts hosts({0, 0, 1});
  const auto far = hosts.Connect(2);
  const auto near = hosts.Connect(0);
  const auto one = hosts.Connect(1, Beyond::kFaults);
  EXPECT_TRUE(one->ArrivalsRing());
  for (int i = 0; i < 2; ++i) {  // the second comes between two looks
    far->Send(1, Text(3, 'f'));
    near->Send(1, Text(3, 'n'));
    std::vector<int> from;
    EXPECT_TRUE(tests::Within(kPatience, [&] {
      if (const auto message = one->TryReceive()) from.push_back(message->from);
      return from.size() == 2;
    }));
    EXPECT_EQ(from, (std::vector<int>{0, 2}));
    EXPECT_FALSE(one->TryReceive().has_value());
  }
}

TEST(ShmTransportTest, AMessageToItselfArrivesInOrder) {
  Hosts hosts({0, 0});
  const auto zero = hosts.Connect(0);
  zero->Send(0, Text(3, 'a'));
  zero->Send(0, {});
  const std::optional<Incoming> first = zero->TryReceive();
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->from, 0);
  EXPECT_EQ(first->bytes, Text(3, 'a'));
  const std::optional<Incoming> second = zero->TryReceive();
  ASSERT_TRUE(second.has_value());
  EXPECT_TRUE(second->bytes.empty());
  EXPECT_FALSE(zero->TryReceive().has_value());
}

// What was sent stays there for who starts to look later, and outlives its sender.
TEST(ShmTransportTest, MessagesWaitForARankThatConnectsLater) {
  Hosts hosts({0, 0});
  hosts.Connect(0)->Send(1, Text(5, 'x'));
  const auto one = hosts.Connect(1);
  const std::optional<Incoming> message = one->TryReceive();
  ASSERT_TRUE(message.has_value());
  EXPECT_EQ(message->bytes, Text(5, 'x'));
}

// Both sides sleep until they are rung: for what arrives, and for room.
TEST(ShmTransportTest, AMessageLongerThanItsMailboxGoesInPiecesAndWakesBothSides) {
  Hosts hosts({0, 0});
  constexpr std::size_t kBytes = std::size_t{5} << 20;
  tests::RankThreads::Run(2, [&](int rank) {
    const auto transport = hosts.Connect(rank);
    const core::TimePoint limit = Clock::now() + kPatience;
    if (rank == 0) {
      transport->Send(1, Text(kBytes, 'l'));
      transport->Send(1, Text(1, 'e'));
      while (true) {
        const std::uint64_t ticket = transport->ArmDoorbell();
        if (transport->Flush()) break;
        ASSERT_TRUE(transport->WaitUntil(ticket, limit)) << "nobody told of room";
      }
      return;
    }
    std::vector<std::size_t> sizes;
    while (sizes.size() < 2) {
      const std::uint64_t ticket = transport->ArmDoorbell();
      if (const std::optional<Incoming> message = transport->TryReceive()) {
        sizes.push_back(message->bytes.size());
        continue;
      }
      ASSERT_TRUE(transport->WaitUntil(ticket, limit)) << "nobody told of an arrival";
    }
    EXPECT_EQ(sizes, (std::vector<std::size_t>{kBytes, 1}));
  });
}

// Every length of message at every place of the ring, often across its end.
TEST(ShmTransportTest, MessagesOfAllLengthsGoRoundTheMailbox) {
  Hosts hosts({0, 0});
  const auto zero = hosts.Connect(0);
  const auto one = hosts.Connect(1);
  for (std::size_t length = 0; length < 3000; length += 1 + length / 37) {
    const char c = static_cast<char>('a' + length % 26);
    for (int i = 0; i < 20; ++i) {
      zero->Send(1, Text(length, c));
      const std::optional<Incoming> message = one->TryReceive();
      ASSERT_TRUE(message.has_value()) << length;
      ASSERT_EQ(message->bytes, Text(length, c));
    }
  }
  EXPECT_TRUE(zero->Flush());
}

TEST(ShmTransportTest, AFloodOfOneRankDoesNotHoldUpTheOthers) {
  Hosts hosts({0, 0, 0, 1});
  const auto zero = hosts.Connect(0);
  const auto one = hosts.Connect(1);
  const auto two = hosts.Connect(2);
  const auto three = hosts.Connect(3);
  for (int i = 0; i < 100; ++i) one->Send(0, Text(8, 'f'));
  two->Send(0, Text(8, 't'));
  three->Send(0, Text(8, 'b'));
  std::array<bool, 4> heard{};
  for (int i = 0; i < 4; ++i) {
    const std::optional<Incoming> message = zero->TryReceive();
    ASSERT_TRUE(message.has_value());
    heard[static_cast<std::size_t>(message->from)] = true;
  }
  EXPECT_EQ(heard, (std::array<bool, 4>{false, true, true, true}));
}

TEST(ShmTransportTest, AnArrivalWakesWhoSleepsAlready) {
  Hosts hosts({0, 0});
  const auto zero = hosts.Connect(0);
  const auto one = hosts.Connect(1);
  for (int round = 0; round < 200; ++round) {
    const std::uint64_t ticket = zero->ArmDoorbell();
    std::thread sender([&] { one->Send(0, Text(1, 'x')); });
    EXPECT_TRUE(zero->WaitUntil(ticket, Clock::now() + kPatience));
    sender.join();
    EXPECT_TRUE(zero->TryReceive().has_value());
  }
}

TEST(ShmTransportTest, ALengthThatNoRankSendsIsAFailureThatNamesTheRank) {
  Hosts hosts({0, 0, 0});
  const auto zero = hosts.Connect(0);
  const auto two = hosts.Connect(2);
  MailboxWriter writer = WriterTo(hosts, 0, 1);
  const std::uint64_t length = std::uint64_t{1} << 40;
  writer.Put(std::as_bytes(std::span(&length, 1)));
  writer.Publish();
  zero->Wake();
  EXPECT_FALSE(zero->TryReceive().has_value());
  EXPECT_EQ(zero->health(),
            Status(StatusCode::kProtocol, "rank 1 announces a message of 1099511627776 bytes"));
  two->Send(0, Text(1, 'x'));
  EXPECT_FALSE(zero->TryReceive().has_value());  // once failed, it stays failed
  // But it sends, so that the others may learn of it.
  zero->Send(2, Text(2, 'y'));
  EXPECT_TRUE(zero->Flush());
  EXPECT_TRUE(two->TryReceive().has_value());
}

// Nor is memory taken for what is only announced.
TEST(ShmTransportTest, AMessageThatIsOnlyAnnouncedIsWaitedFor) {
  Hosts hosts({0, 0});
  const auto zero = hosts.Connect(0);
  MailboxWriter writer = WriterTo(hosts, 0, 1);
  const std::uint64_t length = std::uint64_t{1} << 30;
  writer.Put(std::as_bytes(std::span(&length, 1)));
  writer.Publish();
  zero->Wake();
  EXPECT_FALSE(zero->TryReceive().has_value());
  EXPECT_TRUE(zero->health().ok());
}

TEST(ShmTransportTest, PositionsThatCannotBeAreFailuresThatNameTheRank) {
  Hosts hosts({0, 0});
  const auto zero = hosts.Connect(0);
  HeadOf(hosts, 0, 1).written.store(std::uint64_t{1} << 50);
  zero->Wake();
  EXPECT_FALSE(zero->TryReceive().has_value());
  EXPECT_EQ(zero->health(), Status(StatusCode::kProtocol,
                                   "rank 1 says that it has sent more than its mailbox holds"));

  const auto one = hosts.Connect(1);
  HeadOf(hosts, 0, 1).read.store(77);
  one->Send(0, Text(std::size_t{1} << 20, 'x'));
  EXPECT_EQ(one->health(), Status(StatusCode::kProtocol,
                                  "rank 0 says that it has read what was never sent to it"));
  EXPECT_TRUE(one->Flush());  // nothing is left that could ever go
}

TEST(ShmTransportTest, AFailureBeyondIsOnesOwn) {
  Hosts hosts({0, 1});
  const auto zero = hosts.Connect(0);
  const Status why(StatusCode::kBackend, "cable pulled");
  hosts.hub().Break(0, why);
  EXPECT_EQ(zero->health(), why);
}

TEST(MailboxLayoutTest, AsManyMailboxesAsRanksFitInTheirMemory) {
  const std::int64_t area = LocalGroup::kChannelsBegin - LocalGroup::kMailboxesBegin;
  for (const int members : {1, 2, 3, 64, 255, 256, 1000}) {
    const MailboxLayout layout(area, members);
    EXPECT_LE(layout.OffsetOf(members), area) << members;
    EXPECT_EQ(layout.OffsetOf(1) % 64, 0) << members;
    EXPECT_GE(layout.capacity(), 4096U) << members;
    EXPECT_LE(layout.capacity(), std::size_t{256} << 10) << members;
  }
}

}  // namespace
}  // namespace sirtaki::ops::shm
