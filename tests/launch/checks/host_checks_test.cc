#include "launch/checks/host_checks.h"

#include <gtest/gtest.h>

#include <chrono>

namespace sirtaki::launch {
namespace {

const HostReport kHere{"0.1.0", "Open MPI 4.1.4", "", "libsirtaki.so.0.1.0", "libmpi.so.40.30.4",
                       {}};

HostWish Wish() {
  HostWish wish;
  wish.options.ssh_port = 2222;
  wish.options.program = {"./train", "--epochs", "3"};
  wish.launcher = {LauncherKind::kOpenMpi4, "/usr/bin/mpirun", "4.1.4"};
  wish.self = "/opt/bin/sirtakirun";
  wish.folder = "/data/my work";
  wish.paths = {{"PATH", "/usr/bin:/bin"}};
  wish.patience = std::chrono::seconds(30);
  return wish;
}

CommandOutcome Exited(int code, const std::string& output, const std::string& error = "") {
  return {"", true, {EndKind::kExited, code, ""}, output, error};
}

std::string Judged(const CommandOutcome& outcome) {
  return JudgeHost(Wish(), "h2", kHere, outcome).value_or("fit");
}
std::string JudgedSsh(const std::string& error) { return Judged(Exited(255, "", error)); }
std::string JudgedReport(const HostReport& report) {
  return Judged(Exited(0, "motd\n" + ReportText(report)));
}

TEST(HostChecksTest, TheQuestionStandsAsAShellTakesIt) {
  EXPECT_EQ(AskingWords(Wish(), "h2"),
            (std::vector<std::string>{
                "ssh", "-n", "-o", "BatchMode=yes", "-p", "2222", "-o", "ConnectTimeout=30", "h2",
                "env PATH=/usr/bin:/bin /opt/bin/sirtakirun --check-host '/data/my work' "
                "/usr/bin/mpirun ./train"}));
}

TEST(HostChecksTest, AHostThatIsWaitedForIsAskedBriefly) {
  HostWish wish = Wish();
  wish.wait = std::chrono::minutes(10);
  const auto patience = [&wish](const std::string& error) {
    return AskingWords(wish, "h2", error)[7];
  };
  EXPECT_EQ(patience(""), "ConnectTimeout=2");
  EXPECT_EQ(patience("ssh: connect to host h2 port 22: Connection timed out\r\n"),
            "ConnectTimeout=2");
  EXPECT_EQ(patience("Connection timed out during banner exchange\r\n"), "ConnectTimeout=30");
  wish.patience = std::chrono::seconds(1);
  EXPECT_EQ(patience(""), "ConnectTimeout=1");
}

TEST(HostChecksTest, AHostThatIsStartingIsOutOfReach) {
  for (const char* text :
       {"ssh: Could not resolve hostname h2: Name or service not known",
        "ssh: Could not resolve hostname h2: Temporary failure in name resolution",
        "ssh: connect to host h2 port 2222: Connection refused",
        "ssh: connect to host h2 port 2222: No route to host",
        "ssh: connect to host h2 port 2222: Connection timed out",
        "Connection timed out during banner exchange",
        "kex_exchange_identification: read: Connection reset by peer\r\nConnection reset by "
        "10.0.0.2"}) {
    EXPECT_TRUE(IsOutOfReach(Exited(255, "", std::string(text) + "\r\n"))) << text;
    EXPECT_FALSE(IsOutOfReach(Exited(1, "", std::string(text) + "\r\n"))) << text;
  }
  for (const char* text : {"", "Host key verification failed.\r\nConnection closed by 10.0.0.2",
                           "mpi@h2: Permission denied (publickey).", "something new"}) {
    EXPECT_FALSE(IsOutOfReach(Exited(255, "", text))) << text;
  }
  EXPECT_FALSE(IsOutOfReach({"", false, {}, "", "Connection refused"}));
}

TEST(HostChecksTest, RanksSearchPathsAreAskedWith) {
  PlanInput input;
  input.environment = {{"PATH", "/bin"}, {"LD_LIBRARY_PATH", "/lib"}};
  Plan plan;
  plan.environment = {{"LD_LIBRARY_PATH", "/given"}};
  const HostWish wish = WishOfPlan(input, plan, "/", std::chrono::seconds(1));
  EXPECT_EQ(wish.paths, (std::vector<std::pair<std::string, std::string>>{
                            {"PATH", "/bin"}, {"LD_LIBRARY_PATH", "/given"}}));
}

TEST(HostChecksTest, AHostThatAnswersRightIsFit) { EXPECT_EQ(JudgedReport(kHere), "fit"); }

TEST(HostChecksTest, SaysWhatSshMeant) {
  EXPECT_EQ(JudgedSsh("root@h2: Permission denied (publickey).\r\n"),
            "ssh does not get in without a password (root@h2: Permission denied (publickey).): put "
            "your public key there with ssh-copy-id, or name the right one with -i, until this "
            "asks for nothing: ssh -p 2222 h2");
  EXPECT_EQ(JudgedSsh("ssh: connect to host h2 port 2222: Connection refused\r\n"),
            "no ssh server listens there (ssh: connect to host h2 port 2222: Connection refused): "
            "start sshd on it, or name its port with -p");
  EXPECT_EQ(JudgedSsh("ssh: Could not resolve hostname h2: Name or service not known\n"),
            "no host of this name is known here (ssh: Could not resolve hostname h2: Name or "
            "service not known): check its spelling, or give it an address (DNS, /etc/hosts, "
            "HostName in an ssh config)");
  EXPECT_EQ(JudgedSsh("No ED25519 host key is known for h2 and you have requested strict "
                      "checking.\nHost key verification failed.\n"),
            "its host key is not known here (Host key verification failed.): log in once by hand "
            "and accept it: ssh -p 2222 h2");
  EXPECT_EQ(JudgedSsh("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nsecond\n"
                      "Host key verification failed.\n"),
            "its host key differs from the one that is known (@ WARNING: REMOTE HOST "
            "IDENTIFICATION HAS CHANGED! @): if that is right, remove the old one with "
            "ssh-keygen -R, and log in once: ssh -p 2222 h2");
  for (const char* text : {"Connection timed out", "No route to host", "Network is unreachable"}) {
    const std::string line = std::string("ssh: connect to host h2 port 2222: ") + text;
    EXPECT_EQ(JudgedSsh(line + "\n"),
              "it does not answer (" + line + "): is it up, and does a firewall let ssh pass?");
  }
  EXPECT_EQ(JudgedSsh("something new\n"),
            "ssh failed (something new): try it by hand: ssh -p 2222 h2");
  EXPECT_EQ(JudgedSsh(""), "ssh failed: try it by hand: ssh -p 2222 h2");
}

TEST(HostChecksTest, AHostThatIsSilentIsNotFit) {
  EXPECT_EQ(
      Judged({"", false, {}, "", ""}),
      "no answer within 30 s (--start-timeout): is it up, and does a firewall let ssh pass? By "
      "hand: ssh -p 2222 h2");
  EXPECT_EQ(Judged({"\"ssh\" cannot be started: No such file or directory", false, {}, "", ""}),
            "\"ssh\" cannot be started: No such file or directory: install an ssh client on this "
            "machine");
}

TEST(HostChecksTest, AHostWithoutSirtakiIsNotFit) {
  EXPECT_EQ(Judged(Exited(127, "", "env: '/opt/bin/sirtakirun': No such file or directory\n")),
            "\"/opt/bin/sirtakirun\" is not there (env: '/opt/bin/sirtakirun': No such file or "
            "directory): install Sirtaki under the same path on every host");
  EXPECT_EQ(
      Judged(Exited(127, "", "sirtakirun: error while loading shared libraries: libyaml.so: no\n")),
      "\"/opt/bin/sirtakirun\" does not run there (sirtakirun: error while loading shared "
      "libraries: libyaml.so: no): install this library on it");
  EXPECT_EQ(Judged(Exited(2, "", "sirtakirun: unknown flag --check-host\n")),
            "\"/opt/bin/sirtakirun\" gives no report there but exit code 2 "
            "(sirtakirun: unknown flag --check-host): install the same version under the same path "
            "on every host");
}

TEST(HostChecksTest, WhatTheReportSaysCounts) {
  HostReport report = kHere;
  report.version = "0.0.9";
  EXPECT_EQ(JudgedReport(report),
            "\"/opt/bin/sirtakirun\" is of Sirtaki 0.0.9 there and 0.1.0 here: install the same "
            "version on every host");
  report = kHere;
  report.launcher = "Open MPI 4.1.2";
  EXPECT_EQ(JudgedReport(report),
            "\"/usr/bin/mpirun\" is Open MPI 4.1.2 there and Open MPI 4.1.4 here: install the same "
            "MPI under the same path on every host");
  report.launcher = "";
  EXPECT_EQ(JudgedReport(report),
            "\"/usr/bin/mpirun\" is no MPI launcher there and Open MPI 4.1.4 here: install the "
            "same MPI under the same path on every host");
  report = kHere;
  report.program = "No such file or directory";
  EXPECT_EQ(JudgedReport(report),
            "program \"./train\" cannot be started there (No such file or directory): put it under "
            "the same path on every host");
  report = kHere;
  report.missing = {"libtorch.so", "libmpi.so.40"};
  EXPECT_EQ(JudgedReport(report),
            "program \"./train\" does not find libtorch.so, libmpi.so.40 there: install what is "
            "missing, or name its folder in LD_LIBRARY_PATH");
  report = kHere;
  report.library = "libsirtaki.so.0.1.1";
  EXPECT_EQ(JudgedReport(report),
            "program \"./train\" would load libsirtaki.so.0.1.1 there and libsirtaki.so.0.1.0 "
            "here: install the same version on every host");
  report = kHere;
  for (const char* mpi : {"libmpi.so.12.3.1", ""}) {
    report.mpi = mpi;
    EXPECT_EQ(JudgedReport(report),
              "program \"./train\" would load " +
                  (report.mpi.empty() ? "no library of MPI" : report.mpi) +
                  " there and libmpi.so.40.30.4 here: install the same MPI on every host, and name "
                  "its folder in LD_LIBRARY_PATH if there are several");
  }
}

}  // namespace
}  // namespace sirtaki::launch
