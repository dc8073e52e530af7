#include "launch/elastic/discovery.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>

#include "launch/base/descriptor.h"
#include "launch/hosts/host_list.h"

namespace sirtaki::launch {
namespace {

std::string Parsed(const std::string& text) {
  HostList hosts;
  const core::Status status = ParseDiscovered(text, "find.sh", 3, &hosts);
  return status.ok() ? HostsText(hosts) : status.message();
}

TEST(DiscoveryTest, LinesAreHostsWithOrWithoutSlots) {
  EXPECT_EQ(Parsed("a:4\nb\n\n# all of rack 2\nc slots=2  # old\n"), "a:4,b:3,c:2");
  EXPECT_EQ(Parsed("\n \n"), "");
}

TEST(DiscoveryTest, AWrongLineNamesTheScript) {
  const std::string text = Parsed("a:4\nb:many\n");
  EXPECT_EQ(text.find("--host-discovery-script \"find.sh\", line 2: "), 0U) << text;
  EXPECT_NE(text.find("many"), std::string::npos) << text;
}

class DiscoveryScriptTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "/discovery_test";
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  // The path of a script with these lines.
  std::string Script(const std::string& lines) {
    const std::string path = folder_ + "/find.sh";
    std::ofstream(path + ".new") << "#!/bin/sh\n" << lines << "\n";
    std::filesystem::permissions(path + ".new", std::filesystem::perms::owner_all);
    std::filesystem::rename(path + ".new", path);
    return path;
  }
  std::string folder_;
};

TEST_F(DiscoveryScriptTest, AScriptThatFailsIsNamedWithWhatItSays) {
  HostList hosts;
  const core::Status failed = DiscoverOnce(Script("echo no server >&2; exit 3"), 1, &hosts);
  EXPECT_NE(failed.message().find("exit code 3: no server"), std::string::npos) << failed.message();
  const core::Status absent = DiscoverOnce(folder_ + "/absent.sh", 1, &hosts);
  EXPECT_NE(absent.message().find("cannot be started"), std::string::npos) << absent.message();
}

TEST_F(DiscoveryScriptTest, ItMayBeALineForAShell) {
  HostList hosts;
  const std::string path = Script("echo $2:$#");
  ASSERT_TRUE(DiscoverOnce(path + " --zone 'a'", 1, &hosts).ok());
  EXPECT_EQ(HostsText(hosts), "a:2");
  std::filesystem::rename(path, folder_ + "/find us.sh");
  ASSERT_FALSE(DiscoverOnce(path + " --zone a", 1, &hosts).ok());
  std::ofstream(folder_ + "/hosts") << "b:3\n";
  ASSERT_TRUE(DiscoverOnce("cat " + folder_ + "/hosts", 1, &hosts).ok());
  EXPECT_EQ(HostsText(hosts), "b:3");
  std::ofstream(folder_ + "/find us.sh") << "#!/bin/sh\necho c:1\n";
  ASSERT_TRUE(DiscoverOnce(folder_ + "/find us.sh", 1, &hosts).ok());
  EXPECT_EQ(HostsText(hosts), "c:1");
}

TEST_F(DiscoveryScriptTest, ItRunsAgainAndAFailureLeavesTheHosts) {
  Loop loop;
  const std::string path = Script("echo a:1");
  std::string complaints;
  Discovery discovery(&loop, path, 1, std::chrono::milliseconds(1),
                      [&complaints](const std::string& text) { complaints += text + "\n"; });
  std::optional<HostList> hosts;
  loop.TakeSignals(Loop::UserSignals::kIgnored, [&](int) {
    if (auto found = discovery.TakeHosts(core::Clock::now())) hosts = std::move(found);
  });
  const auto run_once = [&] {
    hosts.reset();
    const core::TimePoint deadline = core::Clock::now() + std::chrono::seconds(60);
    while (!hosts && core::Clock::now() < deadline) {
      discovery.CheckTimes(core::Clock::now());
      loop.Run(discovery.NextTime());
    }
    return hosts ? HostsText(*hosts) : "nothing";
  };
  EXPECT_EQ(run_once(), "a:1");
  Script("[ -e " + folder_ + "/failed ] && echo a:1 && echo b:2 && exit 0; touch " + folder_ +
         "/failed; exit 1");
  EXPECT_EQ(run_once(), "a:1,b:2");
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/failed"));
  EXPECT_EQ(complaints, "--host-discovery-script \"" + path +
                            "\" ended with exit code 1; the hosts are those from before\n");
}

// What the script has started keeps the pipe open for writing for as long as it lives.
TEST_F(DiscoveryScriptTest, WhatItHasStartedEndsWithIt) {
  const std::string pipe = folder_ + "/pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const Descriptor reads(open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  pollfd heard{reads.get(), POLLIN, 0};
  constexpr int kPatienceMs = 60'000;
  Loop loop;
  {
    Discovery discovery(&loop, Script("exec 3>" + pipe + "; echo here >&3; sleep 600"), 1,
                        std::chrono::milliseconds(1), [](const std::string&) {});
    while (core::Clock::now() < discovery.NextTime()) continue;
    discovery.CheckTimes(core::Clock::now());
    ASSERT_EQ(poll(&heard, 1, kPatienceMs), 1);
  }
  std::array<char, 64> said{};
  ASSERT_GT(read(reads.get(), said.data(), said.size()), 0);
  ASSERT_EQ(poll(&heard, 1, kPatienceMs), 1) << "the sleep of the script lives on";
  EXPECT_EQ(read(reads.get(), said.data(), said.size()), 0);
}

}  // namespace
}  // namespace sirtaki::launch
