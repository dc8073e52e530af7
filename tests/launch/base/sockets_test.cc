#include "launch/base/sockets.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <csignal>

namespace sirtaki::launch {
namespace {

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
  std::string why;
  Descriptor there = BeginToConnect("127.0.0.1:" + std::to_string(port), &why);
  ASSERT_TRUE(there.valid()) << why;
  Descriptor here = Accepted(listener);
  ASSERT_TRUE(here.valid());
  EXPECT_EQ(PeerAddress(here), "127.0.0.1");
  EXPECT_EQ(ConnectError(there), "");
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

}  // namespace
}  // namespace sirtaki::launch
