#include "core/machine/cores.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace sirtaki::core {
namespace {

double Quota(const std::map<std::string, std::string>& files) {
  return CgroupCpuQuota([&files](const std::string& path) -> std::optional<std::string> {
    const auto found = files.find(path);
    if (found == files.end()) return std::nullopt;
    return found->second;
  });
}

TEST(CoresTest, NoCgroupIsNoQuota) { EXPECT_EQ(Quota({}), 0.0); }

TEST(CoresTest, ReadsAQuotaOfVersion2) {
  EXPECT_EQ(Quota({{"/proc/self/cgroup", "0::/\n"}, {"/sys/fs/cgroup/cpu.max", "150000 100000\n"}}),
            1.5);
  EXPECT_EQ(Quota({{"/proc/self/cgroup", "0::/\n"}, {"/sys/fs/cgroup/cpu.max", "max 100000\n"}}),
            0.0);
}

TEST(CoresTest, TheTightestQuotaOnTheWayUpCounts) {
  EXPECT_EQ(Quota({{"/proc/self/cgroup", "0::/a/b\n"},
                   {"/sys/fs/cgroup/a/b/cpu.max", "max 100000\n"},
                   {"/sys/fs/cgroup/a/cpu.max", "200000 100000\n"},
                   {"/sys/fs/cgroup/cpu.max", "400000 100000\n"}}),
            2.0);
}

TEST(CoresTest, ReadsAQuotaOfVersion1) {
  EXPECT_EQ(Quota({{"/proc/self/cgroup", "5:memory:/x\n4:cpu,cpuacct:/x\n"},
                   {"/sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "300000\n"},
                   {"/sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000\n"}}),
            3.0);
  EXPECT_EQ(Quota({{"/proc/self/cgroup", "4:cpu:/\n"},
                   {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"},
                   {"/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"}}),
            0.0);
}

TEST(CoresTest, APathThatIsNotToBeSeenLeavesTheMountsRoot) {
  EXPECT_EQ(Quota({{"/proc/self/cgroup", "0::/docker/abc\n"},
                   {"/sys/fs/cgroup/cpu.max", "100000 100000\n"}}),
            1.0);
}

TEST(CoresTest, DamagedFilesAreNoQuota) {
  EXPECT_EQ(Quota({{"/proc/self/cgroup", "nonsense\n0:\n0::/\n"},
                   {"/sys/fs/cgroup/cpu.max", "five of ten"}}),
            0.0);
}

TEST(CoresTest, SharedCoresAreTheUnionOfTheMasks) {
  const std::vector<CpuShare> bound = {{{0}, 0}, {{0}, 0}};
  EXPECT_EQ(SharedCores(bound), 1);
  const std::vector<CpuShare> apart = {{{0}, 0}, {{5}, 0}};
  EXPECT_EQ(SharedCores(apart), 2);
  const std::vector<CpuShare> free = {{{0, 1, 2, 3}, 0}, {{0, 1, 2, 3}, 0}};
  EXPECT_EQ(SharedCores(free), 4);
}

TEST(CoresTest, AQuotaLimitsThemDownToOne) {
  const std::vector<CpuShare> some = {{{0, 1, 2, 3}, 2.5}};
  EXPECT_EQ(SharedCores(some), 2);
  const std::vector<CpuShare> little = {{{0, 1, 2, 3}, 0.5}};
  EXPECT_EQ(SharedCores(little), 1);
  EXPECT_EQ(SharedCores({}), 1);
}

TEST(CoresTest, ThisProcessHasACore) { EXPECT_GE(CpusOfThisProcess().cpus.Count(), 1); }

}  // namespace
}  // namespace sirtaki::core
