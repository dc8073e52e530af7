#include "launch/hosts/allocation.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string_view>

#include "core/base/text.h"

namespace sirtaki::launch {
namespace {

std::string Nodes(std::string_view text) {
  std::vector<std::string> names;
  const core::Status status = ExpandNodeList(text, "NODES", &names);
  if (!status.ok()) return status.message();
  std::string all;
  for (const std::string& name : names) all += name + " ";
  return all;
}

std::string Counts(std::string_view text) {
  std::vector<int> counts;
  const core::Status status = ExpandCounts(text, "COUNTS", &counts);
  if (!status.ok()) return status.message();
  std::string all;
  for (const int count : counts) all += std::to_string(count) + " ";
  return all;
}

std::string Found(const core::EnvironmentView& env,
                  const std::map<std::string, std::string>& files = {}) {
  Allocation allocation;
  const core::Status status = FindAllocation(
      env,
      [&files](const std::string& path) -> std::optional<std::string> {
        const auto found = files.find(path);
        if (found == files.end()) return std::nullopt;
        return found->second;
      },
      &allocation);
  if (!status.ok()) return status.message();
  constexpr std::string_view kNames[] = {"none", "Slurm", "PBS", "LSF"};
  return std::string(core::NameIn(kNames, allocation.system)) + " " + HostsText(allocation.hosts);
}

TEST(AllocationTest, ExpandsListsOfNodes) {
  EXPECT_EQ(Nodes("node7"), "node7 ");
  EXPECT_EQ(Nodes("node[01-03,7],gpu1"), "node01 node02 node03 node7 gpu1 ");
  EXPECT_EQ(Nodes("r[1-2]n[08-10]-ib"), "r1n08-ib r1n09-ib r1n10-ib r2n08-ib r2n09-ib r2n10-ib ");
  EXPECT_EQ(Nodes("a[098-101]"), "a098 a099 a100 a101 ");
}

TEST(AllocationTest, RefusesWhatIsNoListOfNodes) {
  for (const char* text : {"", ",", "a,", "a[1-", "a]1[", "a[[1]]", "a[1-2]]", "a[3-1]", "a[x]",
                           "a[1-2-3]", "a[]", "a[1-99999999]", "a[1-300]b[1-300]", "a[-1]"}) {
    EXPECT_NE(Nodes(text).find("is not a list of hosts"), std::string::npos) << text;
  }
}

TEST(AllocationTest, ExpandsCounts) {
  EXPECT_EQ(Counts("4"), "4 ");
  EXPECT_EQ(Counts("4(x2),1"), "4 4 1 ");
  for (const char* text : {"", "0", "4(x0)", "4(x2", "4(2)", "x", "4,", "4(x99999999)", "(x2)"}) {
    EXPECT_NE(Counts(text).find("is not a list of counts"), std::string::npos) << text;
  }
}

TEST(AllocationTest, OutsideOfAJobThereIsNone) { EXPECT_EQ(Found({{"HOME", "/tmp"}}), "none "); }

TEST(AllocationTest, ReadsSlurm) {
  EXPECT_EQ(Found({{"SLURM_JOB_ID", "7"},
                   {"SLURM_JOB_NODELIST", "node[1-3]"},
                   {"SLURM_TASKS_PER_NODE", "4(x2),1"},
                   {"SLURM_JOB_CPUS_PER_NODE", "8(x3)"}}),
            "Slurm node1:4,node2:4,node3:1");
  EXPECT_EQ(
      Found({{"SLURM_JOB_ID", "7"}, {"SLURM_NODELIST", "node1"}, {"SLURM_JOB_CPUS_PER_NODE", "8"}}),
      "Slurm node1:8");
}

TEST(AllocationTest, SaysWhatSlurmLeavesOpen) {
  EXPECT_EQ(Found({{"SLURM_JOB_ID", "7"}}),
            "SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not: the job's hosts are not known; "
            "name them with -H");
  EXPECT_EQ(Found({{"SLURM_JOB_ID", "7"},
                   {"SLURM_JOB_NODELIST", "node[1-3]"},
                   {"SLURM_TASKS_PER_NODE", "4(x2)"}}),
            "SLURM_TASKS_PER_NODE=\"4(x2)\": has 2 counts, but SLURM_JOB_NODELIST=\"node[1-3]\" "
            "has 3 hosts");
}

TEST(AllocationTest, ReadsANodeFileOfPbs) {
  EXPECT_EQ(Found({{"PBS_NODEFILE", "/pbs/7"}}, {{"/pbs/7", "n1\nn1\nn2\nn2\n"}}), "PBS n1:2,n2:2");
  EXPECT_EQ(Found({{"PBS_NODEFILE", "/pbs/7"}}),
            "PBS_NODEFILE=\"/pbs/7\": the file cannot be read; name the hosts with -H");
  EXPECT_EQ(Found({{"PBS_NODEFILE", "/pbs/7"}}, {{"/pbs/7", "n1\n?\n"}}),
            "\"/pbs/7\", line 2: \"?\" is not a host's name; allowed are letters, digits, dots, "
            "dashes and underscores");
}

TEST(AllocationTest, ReadsLsf) {
  EXPECT_EQ(Found({{"LSB_MCPU_HOSTS", "hostA 4 hostB 2 "}}), "LSF hostA:4,hostB:2");
  EXPECT_EQ(Found({{"LSB_MCPU_HOSTS", "hostA 4 hostB"}}),
            "LSB_MCPU_HOSTS=\"hostA 4 hostB\": expected pairs of a host and its slots, as in \"a 4 "
            "b 2\"");
  EXPECT_EQ(Found({{"LSB_MCPU_HOSTS", "hostA none"}}),
            "LSB_MCPU_HOSTS=\"hostA none\": \"none\" is not a number of slots");
}

}  // namespace
}  // namespace sirtaki::launch
