#include "launch/elastic/job_news.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "core/base/environment.h"
#include "launch/base/loop.h"
#include "launch/job/job_output.h"

namespace sirtaki::launch {
namespace {

using std::chrono::seconds;

// Minutes go by; how often something is told.
int TimesTold(const Membership::Wait& wait, const std::vector<Membership::LeftOut>& hosts) {
  Loop loop;
  const JobOutput output(&loop);
  JobNews news(LaunchOptions(), core::EnvironmentView(), output);
  testing::internal::CaptureStderr();
  for (int i = 0; i < 600; ++i) news.TellWaits(wait, hosts, core::TimePoint() + seconds(i));
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

}  // namespace
}  // namespace sirtaki::launch
