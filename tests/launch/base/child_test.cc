#include "launch/base/child.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <string>

#include "launch/base/run_commands.h"

namespace sirtaki::launch {
namespace {

TEST(ChildTest, TheFileLimitIsRaisedForThisProcessAlone) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit lower{100, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &lower), 0);
  RaiseFileLimit();
  RaiseFileLimit();
  rlimit now{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &now), 0);
  EXPECT_EQ(now.rlim_cur, before.rlim_max);
  int signal = 0;
  const auto outcomes =
      RunCommands({{{"sh", "-c", "ulimit -Sn"}, {}, {}}}, std::chrono::seconds(30), 1, &signal);
  EXPECT_EQ(outcomes[0].output, "100\n");
  setrlimit(RLIMIT_NOFILE, &before);
}

}  // namespace
}  // namespace sirtaki::launch
