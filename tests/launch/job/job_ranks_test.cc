#include "launch/job/job_ranks.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>

namespace sirtaki::launch {
namespace {

using std::chrono::seconds;

const HostList kHosts = {{"a", 2, {}}, {"b", 2, {}}};

// Two on each host, all of which have started.
std::vector<Rank> Ranks() {
  std::vector<Rank> ranks(4);
  for (int i = 0; i < 4; ++i) ranks[i].hello = {i, 4, i % 2, i < 2 ? "a" : "b", 1};
  return ranks;
}

TEST(JobRanksTest, NamesThoseThatAreLate) {
  std::vector<Rank> ranks = Ranks();
  ranks[3].hello = {};
  EXPECT_EQ(JudgeStart(ranks, kHosts, seconds(30)).text,
            "rank 3 has not started within 30 s (hosts: a:2,b:2); --start-timeout sets how long it "
            "may take");
  ranks[0].through = true;
  EXPECT_EQ(
      JudgeInit(ranks, kHosts, seconds(30)).text,
      "ranks 1-3 have not come out of MPI_Init within 30 s (hosts: a:2,b:2); --start-timeout "
      "sets how long it may take, --network-interfaces over which networks MPI connects hosts");
}

TEST(JobRanksTest, ALauncherThatEndsTooEarlyHasFailed) {
  std::vector<Rank> ranks = Ranks();
  const EndMessage well{EndKind::kExited, 0, ""};
  EXPECT_EQ(JudgeLauncher(ranks, false, "mpirun", well)->text,
            "mpirun ended with exit code 0 before all ranks had started: what it printed says why");
  EXPECT_EQ(JudgeLauncher(ranks, true, "mpirun", well)->text,
            "rank 0 on host a was lost: mpirun ended with exit code 0 before the rank did");
  for (Rank& rank : ranks) rank.ended = true;
  EXPECT_EQ(JudgeLauncher(ranks, true, "mpirun", well), std::nullopt);
  // What a rank of Open MPI's that did not finalize MPI comes to.
  EXPECT_EQ(JudgeLauncher(ranks, true, "mpirun", {EndKind::kExited, 1, ""}), std::nullopt);
  const auto died = JudgeLauncher(ranks, true, "mpirun", {EndKind::kSignalled, SIGSEGV, ""});
  EXPECT_EQ(died->text, "mpirun died of SIGSEGV, though every rank ended with 0");
  EXPECT_EQ(died->code, 139);
}

std::string HostName(const std::vector<Rank>& ranks, std::size_t rank, const HostList& hosts,
                     bool oversubscribed = false) {
  Placement placement;
  placement.hosts = hosts;
  placement.ranks = static_cast<int>(ranks.size());
  placement.oversubscribed = oversubscribed;
  const Host* const host = HostOf(ranks, rank, placement, "a");
  return host == nullptr ? "none" : host->name;
}

// Launchers do not all fill hosts in the order of the plan.
TEST(JobRanksTest, ARankIsWhereItSaysThatItIs) {
  std::vector<Rank> ranks = Ranks();
  EXPECT_EQ(HostName(ranks, 0, {{"b", 2, {}}, {"a", 2, {}}}), "a");
  EXPECT_EQ(HostName(ranks, 3, {{"b", 2, {}}, {"a", 2, {}}}), "b");
  EXPECT_EQ(HostName(ranks, 3, {{"b.cluster", 1, {}}, {"a.cluster", 1, {}}}, true), "b.cluster");
  ranks[3].hello.host = "b.cluster";
  EXPECT_EQ(HostName(ranks, 3, {{"b", 2, {}}, {"a", 2, {}}}), "b");
}

TEST(JobRanksTest, ARankIsWhereItCameFrom) {
  std::vector<Rank> ranks = Ranks();
  for (int i = 0; i < 4; ++i) ranks[i].address = i < 2 ? "10.0.0.1" : "10.0.0.2";
  EXPECT_EQ(HostName(ranks, 0, {{"10.0.0.2", 2, {}}, {"10.0.0.1", 2, {}}}), "10.0.0.1");
  EXPECT_EQ(HostName(ranks, 3, {{"10.0.0.2", 1, {}}, {"10.0.0.1", 1, {}}}, true), "10.0.0.2");
  EXPECT_EQ(HostName(ranks, 0, {{"localhost", 2, {}}, {"10.0.0.2", 2, {}}}), "localhost");
}

TEST(JobRanksTest, ByAnotherNameAHostIsKnownByItsPlace) {
  const std::vector<Rank> ranks = Ranks();
  EXPECT_EQ(HostName(ranks, 1, {{"left", 2, {}}, {"right", 2, {}}}), "left");
  EXPECT_EQ(HostName(ranks, 2, {{"left", 2, {}}, {"right", 2, {}}}), "right");
  EXPECT_EQ(HostName(ranks, 2, {{"left", 1, {}}, {"right", 1, {}}}, true), "none");
}

TEST(JobRanksTest, ALauncherThatWasKilledIsTheCause) {
  const Failure failure = JudgeKilledLauncher("mpirun", {EndKind::kSignalled, SIGKILL, ""});
  EXPECT_EQ(failure.text, "mpirun died of SIGKILL, and the ranks with it");
  EXPECT_EQ(failure.code, 137);
}

TEST(JobRanksTest, AHostIsGoneIfNoneOfItsRanksHasTold) {
  Placement placement;
  placement.hosts = kHosts;
  placement.ranks = 4;
  std::vector<Rank> ranks = Ranks();
  for (const int lost : {2, 3}) ranks[lost].ended = ranks[lost].lost = ranks[lost].gone = true;
  EXPECT_EQ(GoneHosts(ranks, placement, "a"), (std::vector<std::string>{"b"}));
  EXPECT_EQ(GoneHosts(ranks, placement, "b"), std::vector<std::string>{});  // this machine is here
  ranks[3].lost = ranks[3].gone = false;  // it has told of its end
  EXPECT_EQ(GoneHosts(ranks, placement, "a"), std::vector<std::string>{});
}

}  // namespace
}  // namespace sirtaki::launch
