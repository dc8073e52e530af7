#include "tcp/silence.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/check.h"
#include "tcp/port.h"
#include "tests/tcp/lines.h"

namespace sirtaki::tcp {
namespace {

using core::Clock;
using core::Status;
using core::StatusCode;
using core::TimePoint;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Verdict = Silence::Verdict;

// Looks every `step`, 1 s at most, from the beginning of a wait on.
class SilenceTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_FALSE(silence_.IsDue(now_)); }

  // The next look after this time, with what the system knows then.
  Verdict After(core::Duration time, const Acknowledged& known) {
    now_ += time;
    EXPECT_TRUE(silence_.IsDue(now_));
    return silence_.Look(known, now_);
  }

  Silence silence_{Patience{seconds(2), seconds(10)}};
  TimePoint now_ = TimePoint() + seconds(1000);
};

TEST_F(SilenceTest, WhatIsSentAndNotAcknowledgedForThePeerTimeoutIsALoss) {
  for (int second = 1; second < 10; ++second) {
    EXPECT_EQ(After(seconds(1), {.is_asked = true, .ago = seconds(second)}), Verdict::kWell);
    EXPECT_EQ(silence_.lasts(), seconds(second));
  }
  EXPECT_EQ(After(seconds(1), {.is_asked = true, .ago = seconds(10)}), Verdict::kLost);
}

TEST_F(SilenceTest, AConnectionThatIsQuietIsPingedAndTheAnswerHasTheRestOfTheTime) {
  EXPECT_EQ(After(seconds(1), {.ago = seconds(1)}), Verdict::kWell);
  EXPECT_EQ(After(seconds(1), {.ago = seconds(2)}), Verdict::kPing);
  for (int second = 3; second < 10; ++second) {
    EXPECT_EQ(After(seconds(1), {.is_asked = true, .ago = seconds(second)}), Verdict::kWell);
  }
  EXPECT_EQ(After(seconds(1), {.is_asked = true, .ago = seconds(10)}), Verdict::kLost);
}

TEST_F(SilenceTest, AcknowledgementsEndIt) {
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(After(seconds(1), {.is_asked = true, .ago = seconds(1)}), Verdict::kWell);
    EXPECT_EQ(After(seconds(1), {.is_asked = true, .ago = milliseconds(3)}), Verdict::kWell);
    EXPECT_EQ(silence_.lasts(), seconds(0));
  }
}

// Its system is asked whether it takes more at times that lie minutes apart.
TEST_F(SilenceTest, ARankThatTakesNothingForLongIsNotLostAndNotPinged) {
  for (int second = 1; second < 200; ++second) {
    EXPECT_EQ(After(seconds(1), {.has_more = true, .ago = seconds(second)}), Verdict::kWell);
  }
}

TEST_F(SilenceTest, TimeInWhichThisRankWasStoppedCountsForLittle) {
  EXPECT_EQ(After(seconds(300), {.is_asked = true, .ago = seconds(300)}), Verdict::kWell);
  EXPECT_EQ(silence_.lasts(), seconds(1));
}

TEST_F(SilenceTest, AWaitCountsFromItsOwnBeginning) {
  for (int second = 1; second < 9; ++second) {
    After(seconds(1), {.is_asked = true, .ago = seconds(second)});
  }
  now_ += seconds(60);
  silence_.Begin();
  EXPECT_FALSE(silence_.IsDue(now_));
  EXPECT_EQ(silence_.lasts(), seconds(0));
  EXPECT_EQ(After(seconds(1), {.is_asked = true, .ago = seconds(69)}), Verdict::kWell);
}

// Two ports whose connections are of TCP, and the sockets of the second one.
class SilentPortTest : public ::testing::Test {
 protected:
  static constexpr Patience kPatience{milliseconds(20), seconds(1)};

  void SetUp() override {
    std::array<std::vector<Line>, 4> lines;  // urgent and bulk of rank 0, of rank 1
    for (auto& of_rank : lines) of_rank.resize(2);
    for (const std::size_t kind : {std::size_t{0}, std::size_t{1}}) {
      auto [one, other] = Pair();
      sockets_.emplace_back(dup(other.get()));
      lines[kind][1] = Line(std::move(one));
      lines[2 + kind][0] = Line(std::move(other));
    }
    for (const std::size_t rank : {std::size_t{0}, std::size_t{1}}) {
      ports_.push_back(std::make_unique<Port>(static_cast<int>(rank), std::move(lines[2 * rank]),
                                              std::move(lines[2 * rank + 1]), tests::HostsOf(2),
                                              kPatience));
    }
  }

  static std::pair<core::Descriptor, core::Descriptor> Pair() {
    core::Descriptor door(socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* const where = reinterpret_cast<sockaddr*>(&address);
    core::Descriptor one(socket(AF_INET, SOCK_STREAM, 0));
    const bool is_made = bind(door.get(), where, length) == 0 && listen(door.get(), 1) == 0 &&
                         getsockname(door.get(), where, &length) == 0 &&
                         connect(one.get(), where, length) == 0;
    SIRTAKI_CHECK(is_made, "a connection over the loopback");
    return {std::move(one), core::Descriptor(accept(door.get(), nullptr, nullptr))};
  }

  // From now on nothing of what is sent to rank 1 arrives: its host is gone, or the link to it. False: this
  // system has no such filters.
  bool CutLink() {
    sock_filter nothing = BPF_STMT(BPF_RET | BPF_K, 0);
    const sock_fprog program{1, &nothing};
    return std::ranges::all_of(sockets_, [&](const core::Descriptor& socket) {
      return setsockopt(socket.get(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)) == 0;
    });
  }

  std::unique_ptr<ops::Completion> Receive0() {
    const ops::wire::Receive receive{1, taken_.data(), static_cast<std::int64_t>(taken_.size())};
    return ports_[0]->Post(kEnvelope, {&receive, 1}, {});
  }
  std::unique_ptr<ops::Completion> Send(std::size_t from) {
    const ops::wire::Send send{from == 0 ? 1 : 0, given_.data(),
                               static_cast<std::int64_t>(given_.size())};
    return ports_[from]->Post(kEnvelope, {}, {&send, 1});
  }
  // Asks until it is so, or 60 s.
  template <class Predicate>
  static void PollUntil(const Predicate& is_so) {
    const TimePoint deadline = Clock::now() + seconds(60);
    while (!is_so()) {
      ASSERT_LT(Clock::now(), deadline) << "a transfer does not end";
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
  void ExpectLost(ops::Completion& one) {
    ASSERT_NO_FATAL_FAILURE(PollUntil([&] { return one.Poll(); }));
    const Status status = one.status();
    EXPECT_EQ(status.code(), StatusCode::kPeerLost) << status.ToString();
    EXPECT_EQ(status.origin().rank, 1);
    EXPECT_NE(
        status.ToString().find("peer lost: rank 1 is lost: host host1 has acknowledged nothing "
                               "that rank 0 on host host0 has sent it for "),
        std::string::npos)
        << status.ToString();
  }

  static constexpr ops::wire::Envelope kEnvelope{ops::wire::Envelope::Space::kMessages, 7};
  std::vector<core::Descriptor> sockets_;
  std::vector<std::unique_ptr<Port>> ports_;
  std::vector<char> given_ = std::vector<char>(1000, 'g');
  std::vector<char> taken_ = std::vector<char>(1000, '?');
};

TEST_F(SilentPortTest, ARankThatWaitsForDataOverALinkThatIsCutNoticesIt) {
  const auto waits = Receive0();
  if (!CutLink()) GTEST_SKIP() << "SO_ATTACH_FILTER: " << std::strerror(errno);
  ExpectLost(*waits);
}

TEST_F(SilentPortTest, ARankWhoseDataGoesNowhereNoticesIt) {
  given_.resize(1'000'000);
  const auto sends = Send(0);
  if (!CutLink()) GTEST_SKIP() << "SO_ATTACH_FILTER: " << std::strerror(errno);
  ExpectLost(*sends);
}

TEST_F(SilentPortTest, APingIsNoMessage) {
  const auto waits = Receive0();
  const auto has_come = [this] {
    int bytes = 0;
    return ioctl(sockets_[1].get(), FIONREAD, &bytes) == 0 && bytes > 0;
  };
  ASSERT_NO_FATAL_FAILURE(PollUntil([&] { return waits->Poll() || has_come(); }));
  EXPECT_TRUE(has_come());
  const auto sends = Send(1);
  ASSERT_NO_FATAL_FAILURE(PollUntil([&] {
    sends->Poll();
    return waits->Poll();
  }));
  EXPECT_TRUE(waits->status().ok()) << waits->status().ToString();
  EXPECT_EQ(taken_, given_);
  // What comes behind it is read as ever.
  std::vector<char> there(given_.size());
  const ops::wire::Receive receive{0, there.data(), static_cast<std::int64_t>(there.size())};
  const auto receives = ports_[1]->Post(kEnvelope, {&receive, 1}, {});
  const auto answers = Send(0);
  ASSERT_NO_FATAL_FAILURE(PollUntil([&] {
    answers->Poll();
    return receives->Poll();
  }));
  EXPECT_TRUE(receives->status().ok()) << receives->status().ToString();
  EXPECT_EQ(there, given_);
}

TEST(AcknowledgedTest, OnlyConnectionsOfTcpTell) {
  auto lines = tests::LinesOfAll(2);
  EXPECT_FALSE(AcknowledgedOn(lines[0][1].get()).has_value());
}

}  // namespace
}  // namespace sirtaki::tcp
