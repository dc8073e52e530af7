#include "core/machine/memory_limit.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>

namespace sirtaki::core {
namespace {

std::int64_t Limit(const std::map<std::string, std::string>& files) {
  return CgroupMemoryLimit([&files](const std::string& path) -> std::optional<std::string> {
    const auto found = files.find(path);
    if (found == files.end()) return std::nullopt;
    return found->second;
  });
}

TEST(MemoryLimitTest, NoCgroupIsNoLimit) { EXPECT_EQ(Limit({}), 0); }

TEST(MemoryLimitTest, TheTightestOfVersion2Counts) {
  EXPECT_EQ(Limit({{"/proc/self/cgroup", "0::/a/b\n"},
                   {"/sys/fs/cgroup/a/b/memory.max", "max\n"},
                   {"/sys/fs/cgroup/a/memory.max", "1048576\n"},
                   {"/sys/fs/cgroup/memory.max", "2097152\n"}}),
            1048576);
}

TEST(MemoryLimitTest, InAContainerTheMountsRootCounts) {
  EXPECT_EQ(
      Limit({{"/proc/self/cgroup", "0::/docker/1234\n"}, {"/sys/fs/cgroup/memory.max", "4096\n"}}),
      4096);
}

TEST(MemoryLimitTest, Version1SaysNoneWithALargeNumber) {
  EXPECT_EQ(Limit({{"/proc/self/cgroup", "5:memory:/x\n4:cpu,cpuacct:/x\n"},
                   {"/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "65536\n"},
                   {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"}}),
            65536);
  EXPECT_EQ(Limit({{"/proc/self/cgroup", "5:memory:/x\n"},
                   {"/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712\n"}}),
            0);
}

TEST(MemoryLimitTest, DamagedFilesAreNoLimit) {
  EXPECT_EQ(Limit({{"/proc/self/cgroup", "0::/\n"}, {"/sys/fs/cgroup/memory.max", "much\n"}}), 0);
  EXPECT_EQ(Limit({{"/proc/self/cgroup", "0::/\n"}, {"/sys/fs/cgroup/memory.max", "-5\n"}}), 0);
}

TEST(MemoryLimitTest, TheHostHasSomeMemory) { EXPECT_GT(MemoryOfHost(), 1 << 20); }

}  // namespace
}  // namespace sirtaki::core
