#include "launch/base/sockets.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>

namespace sirtaki::launch {
namespace {

using std::chrono::seconds;

// The connection that has been made to the listener.
Descriptor Accepted(const Descriptor& listener) {
  pollfd ready{listener.get(), POLLIN, 0};
  EXPECT_EQ(poll(&ready, 1, 30'000), 1);
  return Accept(listener);
}

TEST(SocketsTest, BytesArrive) {
  Descriptor listener;
  int port = 0;
  ASSERT_TRUE(Listen(/*local=*/true, &listener, &port).ok());
  Descriptor there;
  ASSERT_TRUE(ConnectToAny("127.0.0.1:" + std::to_string(port), seconds(30), &there).ok());
  Descriptor here = Accepted(listener);
  ASSERT_TRUE(here.valid());
  EXPECT_EQ(PeerAddress(here), "127.0.0.1");
  EXPECT_EQ(WriteSome(there.get(), "hello").bytes, 5U);
  there.Close();
  std::string bytes;
  for (bool ended = false; !ended;) {
    pollfd ready{here.get(), POLLIN, 0};
    ASSERT_EQ(poll(&ready, 1, 30'000), 1);
    ended = ReadSome(here.get(), &bytes).ended;
  }
  EXPECT_EQ(bytes, "hello");
}

TEST(SocketsTest, WhoDoesNotReadAnyMoreIsNoError) {
  const auto before = std::signal(SIGPIPE, SIG_IGN);
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  close(ends[0]);
  Transfer transfer = WriteSome(ends[1], "x");
  EXPECT_TRUE(transfer.ended);
  EXPECT_EQ(transfer.why, "");
  close(ends[1]);
  const Descriptor full(open("/dev/full", O_WRONLY | O_CLOEXEC));
  transfer = WriteSome(full.get(), "x");
  EXPECT_TRUE(transfer.ended);
  EXPECT_EQ(transfer.why, "No space left on device");
  std::signal(SIGPIPE, before);
}

TEST(SocketsTest, TheAddressThatAnswersIsTaken) {
  Descriptor listener;
  int port = 0;
  ASSERT_TRUE(Listen(/*local=*/true, &listener, &port).ok());
  const std::string good = "127.0.0.1:" + std::to_string(port);
  // Nobody listens at the first; the second is no address.
  const std::string bad = "127.0.0.1:" + std::to_string(FreePort()) + ",nowhere:1,";
  Descriptor there;
  const core::Status status = ConnectToAny(bad + good, seconds(30), &there);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST(SocketsTest, SaysWhyNoneAnswers) {
  const std::string closed = "127.0.0.1:" + std::to_string(FreePort());
  Descriptor there;
  const core::Status status = ConnectToAny(closed + ",x", seconds(30), &there);
  EXPECT_EQ(status.code(), core::StatusCode::kBackend);
  EXPECT_NE(status.message().find(closed + ": Connection refused"), std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("x: is not an address"), std::string::npos) << status.message();
  EXPECT_FALSE(there.valid());
}

}  // namespace
}  // namespace sirtaki::launch
