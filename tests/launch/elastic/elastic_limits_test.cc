#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "core/base/environment.h"
#include "core/base/text.h"
#include "launch/elastic/elastic_options.h"
#include "launch/options/options.h"

namespace sirtaki::launch {
namespace {

// The least and the most ranks that the flags give on hosts with so many slots, or the error.
std::string Limits(const std::vector<std::string>& flags, int slots) {
  LaunchOptions options;
  std::vector<std::string> args = flags;
  args.emplace_back("./train");
  const auto no_file = [](const std::string&) { return std::nullopt; };
  core::Status status = ParseOptions(args, no_file, &options);
  ElasticLimits limits;
  if (status.ok()) status = LimitsOf(options, slots, std::chrono::seconds(30), {}, &limits);
  if (!status.ok()) return status.message();
  EXPECT_TRUE(options.elastic);
  EXPECT_EQ(options.launcher, "sirtakirun");
  return std::to_string(limits.min_ranks) + " to " + std::to_string(limits.max_ranks);
}

TEST(ElasticLimitsTest, TheFlagsSayHowManyRanksThereMayBe) {
  EXPECT_EQ(Limits({"--elastic"}, 8), "1 to 8");
  EXPECT_EQ(Limits({"--elastic", "-np", "4"}, 8), "1 to 4");
  EXPECT_EQ(Limits({"--min-np", "2", "--max-np", "6", "-np", "4"}, 8), "2 to 6");
  EXPECT_EQ(Limits({"--min-num-proc", "3"}, 8), "3 to 8");
  EXPECT_EQ(Limits({"--host-discovery-script", "./find.sh", "--min-np", "2"}, 1), "2 to 1048576");
}

TEST(ElasticLimitsTest, HorovodsVariableIsTheTimeoutThatNoFlagGives) {
  const auto timeout = [](int flag, const core::EnvironmentView& env) {
    LaunchOptions options;
    options.elastic_timeout = flag;
    ElasticLimits limits;
    const core::Status status = LimitsOf(options, 1, std::chrono::seconds(30), env, &limits);
    return status.ok() ? core::DurationText(limits.timeout) : status.message();
  };
  EXPECT_EQ(timeout(0, {}), "10 min");
  EXPECT_EQ(timeout(0, {{"HOROVOD_ELASTIC_TIMEOUT", "7"}}), "7 s");
  EXPECT_EQ(timeout(9, {{"HOROVOD_ELASTIC_TIMEOUT", "x"}}), "9 s");
  EXPECT_EQ(timeout(0, {{"HOROVOD_ELASTIC_TIMEOUT", "x"}}),
            "HOROVOD_ELASTIC_TIMEOUT=x: allowed is 1 to 1000000 seconds");
}

TEST(ElasticLimitsTest, WhatNoJobCanDoIsRefusedByName) {
  const auto refuses = [](const std::vector<std::string>& flags, const std::string& named) {
    const std::string text = Limits(flags, 4);
    EXPECT_EQ(text.rfind(named, 0), 0U) << text;
  };
  refuses({"--min-np", "5"}, "--min-np 5: the hosts have 4 slots");
  refuses({"--min-np", "3", "--max-np", "2"}, "--min-np 3 cannot be given");
  EXPECT_NE(Limits({"--min-np", "2", "--max-np", "1"}, 4).find("at most 1 rank (--max-np)"),
            std::string::npos);
  refuses({"-np", "3", "--max-np", "2"}, "--np 3 cannot be given");
  refuses({"--elastic", "--mpi"}, "--mpi cannot be given");
  refuses({"--elastic", "--launcher", "srun"}, "--launcher cannot be given");
  refuses({"--elastic", "--max-restarts", "1"}, "--max-restarts cannot be given");
  refuses({"--elastic", "--oversubscribe"}, "--oversubscribe cannot be given");
  refuses({"--host-discovery-script", "./find.sh", "-H", "a:4"}, "--hosts beside --host-discovery");
}

// The choice would hold for the first list of the script alone.
TEST(ElasticLimitsTest, AChoiceAmongHostsIsRefusedBesideAScriptAndStaysWithAListOfHosts) {
  for (const std::string flag : {"--include", "--exclude"}) {
    EXPECT_EQ(
        Limits({"--host-discovery-script", "./find.sh", flag, "a:0,2"}, 4),
        flag +
            " beside --host-discovery-script cannot be given for an elastic job: the script "
            "may name others at any time; let it print only the hosts that are to be used, or "
            "name them with --hosts or --hostfile");
    EXPECT_EQ(Limits({"--elastic", "-H", "a:4,b:4", flag, "a:0,2"}, 2), "1 to 2");
    EXPECT_EQ(Limits({"--elastic", "--hostfile", "hosts", flag, "a:0,2"}, 2), "1 to 2");
  }
}

TEST(ElasticLimitsTest, TheCooldownIsTwoNumbersInOneWordOrInTwo) {
  for (const auto& words : {std::vector<std::string>{"--blacklist-cooldown-range", "10,100"},
                            std::vector<std::string>{"--blacklist-cooldown-range", "10", "100"}}) {
    LaunchOptions options;
    std::vector<std::string> args = words;
    args.emplace_back("./train");
    const auto no_file = [](const std::string&) { return std::nullopt; };
    ASSERT_TRUE(ParseOptions(args, no_file, &options).ok()) << words.size();
    EXPECT_EQ(options.cooldown_range[0], 10);
    EXPECT_EQ(options.cooldown_range[1], 100);
    EXPECT_EQ(options.program, std::vector<std::string>{"./train"});
  }
  for (const std::string wrong : {"10", "100,10", "0,10", "a,b", "10,100,5"}) {
    EXPECT_NE(Limits({"--blacklist-cooldown-range", wrong}, 4).find("is not allowed"),
              std::string::npos)
        << wrong;
  }
}

}  // namespace
}  // namespace sirtaki::launch
