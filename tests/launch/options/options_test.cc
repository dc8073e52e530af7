// What the golden scripts do not show.
#include "launch/options/options.h"

#include <gtest/gtest.h>

#include <set>

#include "core/config/config_table.h"
#include "launch/options/option_rows.h"

namespace sirtaki::launch {
namespace {

core::Status Parse(const std::vector<std::string>& args, LaunchOptions* options) {
  return ParseOptions(
      args, [](const std::string&) { return std::nullopt; }, options);
}

TEST(OptionsTest, AFlagHasOneRow) {
  std::set<std::string> names;
  std::set<char> letters;
  for (const OptionGroup& group : OptionGroups()) {
    for (const OptionRow& row : group.rows) {
      EXPECT_TRUE(names.insert(row.name).second) << row.name;
      const bool is_new = row.letter == 0 || letters.insert(row.letter).second;
      EXPECT_TRUE(is_new) << row.letter;
      EXPECT_FALSE(row.help.empty()) << row.name;
    }
  }
}

TEST(OptionsTest, TheHelpNamesEveryFlagAndEveryOptionOfTheLibrary) {
  const std::string help = HelpText();
  for (const OptionGroup& group : OptionGroups()) {
    EXPECT_NE(help.find(group.title + ":"), std::string::npos) << group.title;
    for (const OptionRow& row : group.rows) {
      EXPECT_NE(help.find("--" + row.name), std::string::npos) << row.name;
    }
  }
  EXPECT_NE(help.find("-H [ --hosts ] a:4,b:4"), std::string::npos);
  for (const core::OptionSpec& spec : core::OptionTable()) {
    EXPECT_NE(help.find("--" + spec.Flag().substr(10)), std::string::npos) << spec.name;
  }
}

TEST(OptionsTest, EveryOptionOfTheLibraryCanBeGiven) {
  for (const core::OptionSpec& spec : core::OptionTable()) {
    const std::string value = core::OptionText(spec, core::Config{});
    LaunchOptions options;
    const core::Status status = Parse({spec.Flag() + "=" + value}, &options);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(options.knobs.at(spec.Variable()), value) << spec.name;
  }
}

TEST(OptionsTest, ValuesMayStandAnyhow) {
  for (const std::vector<std::string>& args : {std::vector<std::string>{"--hosts", "a:4"},
                                               {"--hosts=a:4"},
                                               {"-H", "a:4"},
                                               {"-Ha:4"},
                                               {"-host", "a:4"},
                                               {"--host=a:4"}}) {
    LaunchOptions options;
    ASSERT_TRUE(Parse(args, &options).ok()) << args[0];
    EXPECT_EQ(options.hosts, "a:4") << args[0];
  }
  for (const char* flag : {"-np", "--np", "-n", "--num-proc"}) {
    LaunchOptions options;
    ASSERT_TRUE(Parse({flag, "3", "./train", "-n", "9"}, &options).ok()) << flag;
    EXPECT_EQ(options.np, 3) << flag;
    EXPECT_EQ(options.program, (std::vector<std::string>{"./train", "-n", "9"})) << flag;
  }
}

TEST(OptionsTest, ASwitchTakesNoValueFromTheNextWord) {
  for (const char* word : {"true", "false", "on", "off"}) {
    LaunchOptions options;
    EXPECT_FALSE(Parse({"-np", "1", "--autotune", word, "./train"}, &options).ok()) << word;
    EXPECT_FALSE(Parse({"--verbose", word}, &options).ok()) << word;
    for (const std::vector<std::string>& args :
         {std::vector<std::string>{"--autotune", "-np", "1", word},
          {"--autotune=true", word},
          {"--autotune", "--", word}}) {
      ASSERT_TRUE(Parse(args, &options).ok()) << word;
      EXPECT_EQ(options.program, std::vector<std::string>{word});
    }
  }
}

TEST(OptionsTest, AValueMayLookLikeAFlag) {
  LaunchOptions options;
  ASSERT_TRUE(Parse({"--mpi-args", "--oversubscribe -x A", "p"}, &options).ok());
  EXPECT_EQ(options.mpi_args, (std::vector<std::string>{"--oversubscribe", "-x", "A"}));
  EXPECT_FALSE(options.oversubscribe);
}

TEST(OptionsTest, WhatARunHasLeftIsAFolder) {
  LaunchOptions options;
  ASSERT_TRUE(Parse({"--explain", "records"}, &options).ok());
  EXPECT_EQ(options.explain, "records");
  ASSERT_TRUE(Parse({"--merge-timelines=traces"}, &options).ok());
  EXPECT_EQ(options.merge_timelines, "traces");
  EXPECT_EQ(Parse({"--explain="}, &options).message(), "--explain: is empty");
}

TEST(OptionsTest, AsHorovodIsForPython) {
  using Words = std::vector<std::string>;
  LaunchOptions options;
  ASSERT_TRUE(Parse({"--as-horovod", "-np", "2", "python3", "-u", "train.py"}, &options).ok());
  EXPECT_EQ(options.program, (Words{"python3", "-m", "sirtaki.horovod", "-u", "train.py"}));
  ASSERT_TRUE(Parse({"--as-horovod=false", "./train"}, &options).ok());
  EXPECT_EQ(options.program, Words{"./train"});
  ASSERT_TRUE(Parse({"--as-horovod", "--", "/usr/bin/python3.11", "train.py"}, &options).ok());
  EXPECT_EQ(options.program, (Words{"/usr/bin/python3.11", "-m", "sirtaki.horovod", "train.py"}));
  EXPECT_EQ(Parse({"--as-horovod", "./train"}, &options).message(),
            "--as-horovod needs a Python program, as in \"python train.py\"; \"./train\" is none");
}

TEST(OptionsTest, AnErrorLeavesTheOptionsAsTheyWere) {
  LaunchOptions options;
  options.np = 7;
  EXPECT_FALSE(Parse({"-np", "3", "--what"}, &options).ok());
  EXPECT_EQ(options.np, 7);
}

}  // namespace
}  // namespace sirtaki::launch
