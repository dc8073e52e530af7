#include "launch/job/leftovers.h"

#include <gtest/gtest.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace sirtaki::launch {
namespace {

using Prefixes = std::vector<std::string>;

TEST(LeftoversTest, NamesAreOfTheJobAlone) {
  EXPECT_EQ(SegmentPrefixes({{"OMPI_MCA_ess_base_jobid", "783089665"}}, "vm", 0),
            Prefixes{"vader_segment.vm.0.2ead0001."});
  EXPECT_EQ(SegmentPrefixes({{"OMPI_MCA_ess_base_jobid", "1"}}, "vm.example.org", 7),
            Prefixes{"vader_segment.vm.7.1."});
  EXPECT_EQ(SegmentPrefixes({{"OMPI_MCA_ess_base_jobid", "1"}}, "10.0.0.1", 7),
            Prefixes{"vader_segment.10.0.0.1.7.1."});
  // Open MPI 5.0.11 named them so.
  EXPECT_EQ(SegmentPrefixes({{"PMIX_NAMESPACE", "prterun-vm-2591@1"}}, "vm", 0),
            Prefixes{"sm_segment.vm.0.fb530001."});
  EXPECT_EQ(SegmentPrefixes({{"PMIX_NAMESPACE", "prterun-vm-3950@1"}}, "vm.example.org", 7),
            Prefixes{"sm_segment.vm.7.773b0001."});
  EXPECT_EQ(SegmentPrefixes({}, "vm", 0), Prefixes{});
  EXPECT_EQ(SegmentPrefixes({{"OMPI_MCA_ess_base_jobid", "x"}}, "vm", 0), Prefixes{});
  EXPECT_EQ(SegmentPrefixes({{"OMPI_MCA_ess_base_jobid", "1"}}, "", 0), Prefixes{});
}

TEST(LeftoversTest, DomainsStayWhereTheyMatter) {
  EXPECT_EQ(SegmentPrefixes(
                {{"OMPI_MCA_ess_base_jobid", "1"}, {"OMPI_MCA_orte_keep_fqdn_hostnames", "1"}},
                "vm.example.org", 7),
            Prefixes{"vader_segment.vm.example.org.7.1."});
}

// The ranks may be of Open MPI 4, whose names here are those of 4.1.4, or of 5.
TEST(LeftoversTest, NamesUnderSrun) {
  EXPECT_EQ(SegmentPrefixes({{"PMIX_NAMESPACE", "slurm.pmix.1.0"}}, "h1", 0),
            (Prefixes{"sm_segment.h1.0.7bfb0000.", "vader_segment.h1.0.36a24d59."}));
  EXPECT_EQ(SegmentPrefixes({{"PMIX_NAMESPACE", "slurm.pmix.2.0"}}, "h1.example.org", 7),
            (Prefixes{"sm_segment.h1.7.42c90000.", "vader_segment.h1.7.8dc24f0b."}));
}

TEST(LeftoversTest, OnlyWhatBeginsSoIsRemoved) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("leftovers." + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  for (const char* name : {"a.1.0", "a.1.1", "a.10.0", "b.1.0"})
    std::ofstream(folder / name) << "x";
  RemoveSegments(folder, "a.1.");
  EXPECT_FALSE(std::filesystem::exists(folder / "a.1.0"));
  EXPECT_FALSE(std::filesystem::exists(folder / "a.1.1"));
  EXPECT_TRUE(std::filesystem::exists(folder / "a.10.0"));
  EXPECT_TRUE(std::filesystem::exists(folder / "b.1.0"));
  RemoveSegments(folder / "none", "a");  // no folder, nothing to do
  std::filesystem::remove_all(folder);
}

// The leader of a session cannot leave its group; what it has started is in there.
TEST(LeftoversTest, OthersOfTheGroupAreKilledButNotTheOneThatAsks) {
  const pid_t leader = fork();
  if (leader == 0) {
    setsid();
    pid_t children[2];
    for (pid_t& child : children) {
      if ((child = fork()) == 0) {
        for (;;) pause();
      }
    }
    KillOthersOfGroup();
    for (const pid_t child : children) {
      int state = 0;
      if (waitpid(child, &state, 0) != child || !WIFSIGNALED(state)) _exit(1);
    }
    _exit(0);
  }
  int state = 0;
  ASSERT_EQ(waitpid(leader, &state, 0), leader);
  EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0);
}

TEST(LeftoversTest, ASignalGoesToThoseOfTheGroupThatCatchIt) {
  const pid_t leader = fork();
  if (leader == 0) {
    setsid();
    int ready[2];
    if (pipe(ready) != 0) _exit(2);
    pid_t children[3];
    for (int which = 0; which < 3; ++which) {
      if ((children[which] = fork()) != 0) continue;
      sigset_t asked;
      sigemptyset(&asked);
      sigaddset(&asked, SIGUSR1);
      if (which == 1) signal(SIGUSR1, [](int) { _exit(5); });
      if (which == 2) sigprocmask(SIG_BLOCK, &asked, nullptr);
      (void)!write(ready[1], "", 1);
      signalfd_siginfo got;
      if (which == 2) _exit(read(signalfd(-1, &asked, 0), &got, sizeof got) > 0 ? 5 : 6);
      for (;;) pause();
    }
    char byte = 0;
    for (int begun = 0; begun < 3; ++begun) {
      if (read(ready[0], &byte, 1) != 1) _exit(3);
    }
    SignalOthersThatCatch(SIGUSR1);
    int state = 0;
    for (const int which : {1, 2}) {
      const bool ended = waitpid(children[which], &state, 0) == children[which];
      if (!ended || !WIFEXITED(state) || WEXITSTATUS(state) != 5) _exit(which);
    }
    // A signal that it does not catch would have come before this one.
    kill(children[0], SIGKILL);
    const bool ended = waitpid(children[0], &state, 0) == children[0];
    _exit(ended && WIFSIGNALED(state) && WTERMSIG(state) == SIGKILL ? 0 : 4);
  }
  int state = 0;
  ASSERT_EQ(waitpid(leader, &state, 0), leader);
  EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << state;
}

// In a process of its own, which adopts.
TEST(LeftoversTest, OrphansOfANameAreEndedAndNoOthers) {
  const pid_t adopter = fork();
  if (adopter == 0) {
    setsid();
    AdoptOrphans();
    const auto end = [](int code) {
      KillOthersOfGroup();
      _exit(code);
    };
    if (std::system("exec >/dev/null 2>&1; sleep 120 & tail -f /dev/null &") != 0) end(1);
    const auto ends_one = [](const char* name, int* state) {
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      while (std::chrono::steady_clock::now() < deadline) {
        EndOrphans(name);  // it may not have its name yet
        if (waitpid(-1, state, WNOHANG) > 0) {
          return WIFSIGNALED(*state) && WTERMSIG(*state) == SIGTERM;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return false;
    };
    int state = 0;
    if (!ends_one("sleep", &state)) end(2);
    if (waitpid(-1, &state, WNOHANG) != 0) end(3);  // the other one is there
    end(ends_one("tail", &state) ? 0 : 4);
  }
  int state = 0;
  ASSERT_EQ(waitpid(adopter, &state, 0), adopter);
  ASSERT_TRUE(WIFEXITED(state));
  EXPECT_EQ(WEXITSTATUS(state), 0);
}

}  // namespace
}  // namespace sirtaki::launch
