#include "launch/base/descriptor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <string>

namespace sirtaki::launch {
namespace {

TEST(DescriptorTest, BytesArrive) {
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe2(ends.data(), O_NONBLOCK), 0);
  const Descriptor reader(ends[0]);
  Descriptor writer(ends[1]);
  std::string bytes;
  EXPECT_FALSE(ReadSome(reader.get(), &bytes).ended);  // there is nothing yet
  EXPECT_EQ(WriteSome(writer.get(), "hello").bytes, 5U);
  writer.Close();
  EXPECT_FALSE(ReadSome(reader.get(), &bytes).ended);
  EXPECT_TRUE(ReadSome(reader.get(), &bytes).ended);
  EXPECT_EQ(bytes, "hello");
}

TEST(DescriptorTest, WhoDoesNotReadAnyMoreIsNoError) {
  const auto before = std::signal(SIGPIPE, SIG_IGN);
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  close(ends[0]);
  Transfer transfer = WriteSome(ends[1], "x");
  EXPECT_TRUE(transfer.ended);
  EXPECT_TRUE(transfer.why.ok());
  close(ends[1]);
  const Descriptor full(open("/dev/full", O_WRONLY | O_CLOEXEC));
  transfer = WriteSome(full.get(), "x");
  EXPECT_TRUE(transfer.ended);
  EXPECT_EQ(transfer.why.message(), "No space left on device");
  std::signal(SIGPIPE, before);
}

}  // namespace
}  // namespace sirtaki::launch
