#include "launch/checks/host_cache.h"

#include <gtest/gtest.h>

namespace sirtaki::launch {
namespace {

HostWish CachedWish() {
  HostWish wish;
  wish.options.ssh_port = 2222;
  wish.options.program = {"./train"};
  wish.launcher = {LauncherKind::kOpenMpi4, "/usr/bin/mpirun", "4.1.4"};
  return wish;
}

TEST(HostCacheTest, AFitHostIsBelievedForAnHour) {
  HostCache first("", 1000);
  const std::string key = HostCache::KeyOf(CachedWish(), "h2");
  EXPECT_FALSE(first.Knows(key));
  first.Add(key);
  EXPECT_TRUE(HostCache(first.Text(), 1000 + 3599).Knows(key));
  EXPECT_FALSE(HostCache(first.Text(), 1000 + 3600).Knows(key));
  EXPECT_FALSE(HostCache(first.Text(), 999).Knows(key));
  // What is still fresh is kept beside what comes later.
  HostCache second("no line of ours\n\n7\n" + first.Text(), 2000);
  second.Add("h3:0");
  EXPECT_EQ(second.Text(), "1000 " + key + "\n2000 h3:0\n");
}

TEST(HostCacheTest, AnotherQuestionIsAskedAgain) {
  const std::string key = HostCache::KeyOf(CachedWish(), "h2");
  EXPECT_NE(HostCache::KeyOf(CachedWish(), "h3"), key);
  HostWish wish = CachedWish();
  wish.options.ssh_port = 22;
  EXPECT_NE(HostCache::KeyOf(wish, "h2"), key);
  wish = CachedWish();
  wish.options.program = {"./other"};
  EXPECT_NE(HostCache::KeyOf(wish, "h2"), key);
  wish = CachedWish();
  wish.launcher.version = "4.1.5";
  EXPECT_NE(HostCache::KeyOf(wish, "h2"), key);
}

}  // namespace
}  // namespace sirtaki::launch
