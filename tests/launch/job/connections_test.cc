#include "launch/job/connections.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>

#include <chrono>
#include <optional>
#include <string>
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

  // A connection that sirtakirun has taken, or has had no room for.
  Descriptor Connect() {
    std::string why;
    Descriptor there = BeginToConnect(address(), &why);
    pollfd connected{there.get(), POLLOUT, 0};
    EXPECT_EQ(poll(&connected, 1, 60'000), 1) << why;
    connections_.AcceptAll(Clock::now());
    return there;
  }

  // What is said is handed on here, as sirtakirun hands it on.
  static void Greet(Connection* here) {
    const Caller rank(kKey, OwnEndpoint(here->fd));
    std::string reply;
    EXPECT_TRUE(here->keeper.Take(MessageIn(rank.Opening()), &reply));
    std::string proof;
    EXPECT_TRUE(rank.Take(MessageIn(reply), &proof).ok());
    EXPECT_TRUE(here->keeper.Take(MessageIn(proof), &reply));
  }

  static RankMessage MessageIn(const std::string& frame) {
    MessageReader reader;
    reader.Append(frame);
    std::optional<RankMessage> message;
    EXPECT_TRUE(reader.Next(&message).ok());
    return message.value();
  }

  static bool IsClosed(const Descriptor& there) {
    pollfd ready{there.get(), POLLIN, 0};
    std::string bytes;
    return poll(&ready, 1, 0) == 1 && ReadSome(there.get(), &bytes).ended;
  }

  Connections connections_{3};
  int port_ = 0;
};

TEST_F(ConnectionsTest, TheOldestOfTooManyThatProveNothingGoes) {
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 5; ++i) strangers.push_back(Connect());
  connections_.RemoveClosed();
  EXPECT_EQ(connections_.all().size(), 3U);
  std::vector<bool> closed;
  for (const Descriptor& stranger : strangers) closed.push_back(IsClosed(stranger));
  EXPECT_EQ(closed, (std::vector<bool>{true, true, false, false, false}));
}

TEST_F(ConnectionsTest, OneThatHasProvenItStays) {
  const Descriptor rank = Connect();
  Greet(connections_.all().front().get());
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 5; ++i) strangers.push_back(Connect());
  connections_.RemoveClosed();
  EXPECT_EQ(connections_.all().size(), 4U);
  EXPECT_FALSE(IsClosed(rank));
  EXPECT_TRUE(IsClosed(strangers.front()));
}

TEST_F(ConnectionsTest, OneThatDoesNotSayWhichRankItIsIsClosedInTime) {
  const Descriptor rank = Connect();
  const Descriptor silent = Connect();
  connections_.all().front()->rank = 0;
  const auto time = connections_.NextTime();
  ASSERT_TRUE(time);
  EXPECT_EQ(*time, connections_.all().back()->silent_by);
  connections_.CheckTimes(*time - seconds(1));
  EXPECT_FALSE(IsClosed(silent));
  connections_.CheckTimes(*time);
  EXPECT_TRUE(IsClosed(silent));
  EXPECT_FALSE(IsClosed(rank));
  connections_.RemoveClosed();
  EXPECT_FALSE(connections_.NextTime());
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
  const Descriptor rank = Connect();
  Greet(connections_.all().front().get());
  const Descriptor stranger = Connect();
  std::string why;
  const Descriptor waits = BeginToConnect(address(), &why);
  pollfd connected{waits.get(), POLLOUT, 0};
  ASSERT_EQ(poll(&connected, 1, 60'000), 1) << why;
  const auto now = Clock::now();
  {
    const FullTable full;
    connections_.AcceptAll(now);
  }
  EXPECT_TRUE(IsClosed(stranger));  // to make room
  EXPECT_FALSE(IsClosed(rank));
  EXPECT_EQ(connections_.accept_fd(), -1);
  const auto again = connections_.NextTime();
  ASSERT_TRUE(again);
  EXPECT_GT(*again, now);
  connections_.CheckTimes(*again);
  EXPECT_GE(connections_.accept_fd(), 0);
  connections_.RemoveClosed();
  EXPECT_EQ(connections_.all().size(), 1U);
  connections_.AcceptAll(*again);
  EXPECT_EQ(connections_.all().size(), 2U);
}

}  // namespace
}  // namespace sirtaki::launch
