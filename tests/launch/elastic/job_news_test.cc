#include "launch/elastic/job_news.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <iterator>
#include <string>
#include <vector>

#include "core/base/environment.h"
#include "launch/base/descriptor.h"
#include "launch/base/loop.h"
#include "launch/job/job_output.h"

namespace sirtaki::launch {
namespace {

using std::chrono::seconds;

// Minutes go by; how often something is told.
int TimesTold(const Membership::Wait& wait, const std::vector<Membership::LeftOut>& hosts) {
  testing::internal::CaptureStderr();
  Loop loop;
  JobOutput output(&loop);
  JobNews news(LaunchOptions(), core::EnvironmentView(), &output);
  for (int i = 0; i < 600; ++i) news.TellWaits(wait, hosts, core::TimePoint() + seconds(i));
  output.WriteLast(core::TimePoint::max());
  const std::string text = testing::internal::GetCapturedStderr();
  int times = 0;
  for (const char c : text) times += c == '\n' ? 1 : 0;
  return times;
}

TEST(JobNewsTest, AHostThatIsLeftOutForGoodWhileTheJobTrainsIsToldOnce) {
  const Membership::LeftOut hangs = {"c", core::TimePoint::max(), "it hangs"};
  const Membership::LeftOut failed = {"d", core::TimePoint() + seconds(600), "they have failed"};
  EXPECT_EQ(TimesTold({}, {}), 0);
  EXPECT_EQ(TimesTold({}, {hangs}), 1);
  EXPECT_EQ(TimesTold({}, {hangs, failed}), 10);
  EXPECT_EQ(TimesTold({.what = "others"}, {hangs}), 10);
}

// Nobody reads, and standard error is full: that must not keep the loop from taking signals.
TEST(JobNewsTest, AReaderWhoDoesNotReadHoldsNobodyUp) {
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe2(ends.data(), O_CLOEXEC), 0);
  const Descriptor reads(ends[0]);
  const Descriptor before(dup(STDERR_FILENO));
  ASSERT_EQ(dup2(ends[1], STDERR_FILENO), STDERR_FILENO);
  close(ends[1]);
  const auto size = static_cast<std::size_t>(fcntl(STDERR_FILENO, F_GETPIPE_SZ));
  const std::string full(size, 'x');
  ASSERT_EQ(write(STDERR_FILENO, full.data(), size), std::ssize(full));
  alarm(60);  // ends this test if it blocks
  {
    Loop loop;
    JobOutput output(&loop);
    const JobNews news(LaunchOptions(), core::EnvironmentView(), &output);
    news.Say("the news");
    output.WriteLast(core::Clock::now() + std::chrono::milliseconds(50));
    EXPECT_TRUE(output.HasWaiting(Stream::kError));
    std::string text = full;
    ASSERT_EQ(read(reads.get(), text.data(), size), std::ssize(text));
    output.WriteLast(core::TimePoint::max());
    text.resize(static_cast<std::size_t>(read(reads.get(), text.data(), size)));
    EXPECT_EQ(text, "sirtakirun: the news\n");
  }
  alarm(0);
  dup2(before.get(), STDERR_FILENO);
}

}  // namespace
}  // namespace sirtaki::launch
