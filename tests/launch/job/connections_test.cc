#include "launch/job/connections.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace sirtaki::launch {
namespace {

using core::Clock;
using std::chrono::seconds;

const std::string kKey = "00112233445566778899aabbccddeeff";

class ConnectionsTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(connections_.Open(/*local=*/true, kKey, &port_).ok()); }

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  // Whether it comes true.
  bool Await(const std::function<bool()>& condition) {
    const auto deadline = Clock::now() + seconds(60);
    while (!condition() && Clock::now() < deadline) loop_.Run(deadline);
    return condition();
  }

  // Begins to connect, and then notices whether sirtakirun closes the connection.
  void BeginToConnect(Link* there) {
    there->Connect(&loop_, address(), [there](const core::Status& why) {
      ASSERT_TRUE(why.ok()) << why.message();
      there->Hear([](const RankMessage&) { return true; }, [](const core::Status&) {});
    });
  }

  // A stranger's connection, which sirtakirun has taken.
  void Connect(Link* there) {
    const std::size_t before = connections_.all().size();
    BeginToConnect(there);
    EXPECT_TRUE(Await([&] { return connections_.all().size() > before; }));
  }

  // A rank's, which has proven that it is one.
  Link ConnectAsRank() {
    Link rank;
    const core::Status status = ConnectToAny(&loop_, address(), kKey, seconds(60), &rank);
    EXPECT_TRUE(status.ok()) << status.message();
    rank.Hear([](const RankMessage&) { return true; }, [](const core::Status&) {});
    return rank;
  }

  Loop loop_;
  std::vector<std::pair<int, std::string>> heard_;  // of which rank, and what it has printed
  std::vector<core::Status> ends_;
  Connections connections_{&loop_, 3,
                           [this](Connection* from, const RankMessage& message) {
                             if (const auto* hello = std::get_if<HelloMessage>(&message)) {
                               from->rank = hello->rank;
                             }
                             if (const auto* output = std::get_if<OutputMessage>(&message)) {
                               heard_.emplace_back(from->rank, output->bytes);
                             }
                             return !std::holds_alternative<WelcomeMessage>(message);
                           },
                           [this](Connection*, const core::Status& why) { ends_.push_back(why); }};
  int port_ = 0;
};

TEST_F(ConnectionsTest, TheOldestOfTooManyThatProveNothingGoes) {
  std::array<Link, 5> strangers;
  for (Link& stranger : strangers) Connect(&stranger);
  EXPECT_TRUE(Await([&] { return !strangers[0].is_open() && !strangers[1].is_open(); }));
  for (const std::size_t i : {2U, 3U, 4U}) EXPECT_TRUE(strangers.at(i).is_open()) << i;
  connections_.CheckTimes(core::TimePoint());
  EXPECT_EQ(connections_.all().size(), 3U);
}

TEST_F(ConnectionsTest, OneThatHasProvenItStays) {
  const Link rank = ConnectAsRank();
  std::array<Link, 5> strangers;
  for (Link& stranger : strangers) Connect(&stranger);
  EXPECT_TRUE(Await([&] { return !strangers[0].is_open() && !strangers[1].is_open(); }));
  EXPECT_TRUE(rank.is_open());
  connections_.CheckTimes(core::TimePoint());
  EXPECT_EQ(connections_.all().size(), 4U);
}

TEST_F(ConnectionsTest, MessagesAreHandedOnUntilTheEnd) {
  Link rank = ConnectAsRank();
  rank.Send(Encode(HelloMessage{1, 2, 0, "host", 1}));
  rank.Send(Encode(OutputMessage{Stream::kOutput, "hello"}));
  rank.Close();
  ASSERT_TRUE(Await([&] { return !ends_.empty(); }));
  EXPECT_EQ(heard_, (std::vector<std::pair<int, std::string>>{{1, "hello"}}));
  EXPECT_TRUE(ends_.front().ok()) << ends_.front().message();
  connections_.CheckTimes(Clock::now());
  EXPECT_TRUE(connections_.all().empty());
}

TEST_F(ConnectionsTest, OneThatSaysWhatNoRankSaysIsClosed) {
  Link babbler = ConnectAsRank();
  Link confused = ConnectAsRank();
  babbler.Send("HTTP/1.1 400 Bad Request\r\n");
  ASSERT_TRUE(Await([&] { return !babbler.is_open(); }));
  confused.Send(Encode(WelcomeMessage{}));
  ASSERT_TRUE(Await([&] { return !confused.is_open(); }));
  ASSERT_EQ(ends_.size(), 2U);
  EXPECT_EQ(ends_[0].code(), core::StatusCode::kProtocol);
  EXPECT_TRUE(ends_[1].ok());
  EXPECT_TRUE(heard_.empty());
}

TEST_F(ConnectionsTest, OneThatDoesNotSayWhichRankItIsIsClosedInTime) {
  const Link rank = ConnectAsRank();
  Link silent;
  Connect(&silent);
  connections_.all().front()->rank = 0;
  const auto time = connections_.NextTime();
  EXPECT_EQ(time, connections_.all().back()->silent_by);
  connections_.CheckTimes(time - seconds(1));
  EXPECT_EQ(connections_.all().size(), 2U);
  connections_.CheckTimes(time);
  EXPECT_TRUE(Await([&] { return !silent.is_open(); }));
  EXPECT_TRUE(rank.is_open());
  EXPECT_EQ(connections_.all().size(), 1U);
  EXPECT_EQ(connections_.NextTime(), core::TimePoint::max());
}

// No descriptor can be opened while it lives.
class FullTable {
 public:
  FullTable() {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit none{0, before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~FullTable() { setrlimit(RLIMIT_NOFILE, &before_); }
  FullTable(const FullTable&) = delete;
  FullTable& operator=(const FullTable&) = delete;

 private:
  rlimit before_{};
};

TEST_F(ConnectionsTest, WhereThereIsNoRoomItWaitsAndGoesOn) {
  const Link rank = ConnectAsRank();
  connections_.all().front()->rank = 0;
  Link stranger;
  Connect(&stranger);
  Link waits;
  BeginToConnect(&waits);
  const auto before = Clock::now();
  for (const auto& connection : connections_.all()) connection->silent_by = core::TimePoint::max();
  {
    const FullTable full;
    EXPECT_TRUE(Await([&] { return connections_.NextTime() != core::TimePoint::max(); }));
  }
  EXPECT_TRUE(Await([&] { return !stranger.is_open(); }));  // to make room
  EXPECT_TRUE(rank.is_open());
  EXPECT_EQ(connections_.all().size(), 2U);
  const auto again = connections_.NextTime();
  EXPECT_GT(again, before);
  connections_.CheckTimes(again);
  EXPECT_EQ(connections_.all().size(), 1U);
  EXPECT_TRUE(Await([&] { return connections_.all().size() == 2; }));
  EXPECT_TRUE(waits.is_open());
}

}  // namespace
}  // namespace sirtaki::launch
