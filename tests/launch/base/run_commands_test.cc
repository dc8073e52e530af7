#include "launch/base/run_commands.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <optional>
#include <string>

namespace sirtaki::launch {
namespace {

using std::chrono::seconds;

Command Shell(const std::string& script) { return {{"sh", "-c", script}, {}, {}}; }

std::vector<CommandOutcome> Outcomes(std::vector<Command> commands, core::Duration patience,
                                     std::size_t at_once = 8) {
  int signal = 0;
  auto outcomes = RunCommands(std::move(commands), patience, at_once, &signal);
  EXPECT_EQ(signal, 0);
  return outcomes;
}

TEST(RunCommandsTest, TellsWhatEachPrintedAndHowItEnded) {
  const auto outcomes = Outcomes({Shell("echo out; echo err >&2"),
                                  Shell("exit 7"),
                                  Shell("kill -TERM $$"),
                                  {{"/no/such/program"}, {}, {}}},
                                 seconds(30), 2);
  ASSERT_EQ(outcomes.size(), 4U);
  EXPECT_TRUE(outcomes[0].in_time);
  EXPECT_EQ(outcomes[0].output, "out\n");
  EXPECT_EQ(outcomes[0].error, "err\n");
  EXPECT_EQ(outcomes[0].end, (EndMessage{EndKind::kExited, 0, ""}));
  EXPECT_EQ(outcomes[1].end, (EndMessage{EndKind::kExited, 7, ""}));
  EXPECT_EQ(outcomes[2].end, (EndMessage{EndKind::kSignalled, SIGTERM, ""}));
  EXPECT_NE(outcomes[3].why.find("No such file"), std::string::npos) << outcomes[3].why;
  EXPECT_FALSE(outcomes[3].in_time);
}

TEST(RunCommandsTest, OneThatTakesTooLongIsKilled) {
  const auto outcomes =
      Outcomes({Shell("echo begun; exec sleep 600"), Shell("echo done")}, seconds(12));
  EXPECT_FALSE(outcomes[0].in_time);
  EXPECT_TRUE(outcomes[0].why.empty());
  EXPECT_EQ(outcomes[0].output, "begun\n");
  EXPECT_TRUE(outcomes[1].in_time);
}

TEST(RunCommandsTest, WhatOneThatIsKilledHasStartedEndsWithIt) {
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);  // its writer goes to all of them
  const auto outcomes = Outcomes({Shell("sleep 600 & wait")}, seconds(1));
  EXPECT_FALSE(outcomes[0].in_time);
  close(ends[1]);
  pollfd closed{ends[0], POLLIN, 0};
  EXPECT_EQ(poll(&closed, 1, 20'000), 1) << "its helper has outlived it";
  close(ends[0]);
}

TEST(RunCommandsTest, WhoHoldsThePipesLaterIsNotWaitedFor) {
  const core::TimePoint before = core::Clock::now();
  const auto outcomes = Outcomes({Shell("sleep 60 & echo $!")}, seconds(40));
  EXPECT_TRUE(outcomes[0].in_time);
  EXPECT_LT(core::Clock::now() - before, seconds(30));
  kill(std::stoi(outcomes[0].output), SIGKILL);
}

TEST(RunCommandsTest, LongOutputIsReadAndCut) {
  const auto outcomes = Outcomes({Shell("yes | head -c 1000000; echo end >&2")}, seconds(30));
  EXPECT_TRUE(outcomes[0].in_time);
  EXPECT_EQ(outcomes[0].output.size(), 64U * 1024U);
  EXPECT_EQ(outcomes[0].error, "end\n");
}

TEST(RunCommandsTest, ASignalEndsAll) {
  int signal = 0;
  const auto outcomes = RunCommands(
      {Shell("kill -TERM $PPID; exec sleep 600"), Shell("exec sleep 600"), Shell("echo never")},
      seconds(60), 2, &signal);
  EXPECT_EQ(signal, SIGTERM);
  EXPECT_FALSE(outcomes[0].in_time);
  EXPECT_FALSE(outcomes[1].in_time);
  EXPECT_EQ(outcomes[2], CommandOutcome{});
}

TEST(RunCommandsTest, OneIsRunAgainAsLongAsItIsWished) {
  int runs = 0;
  const RunAgain again = [&runs](std::size_t i, const CommandOutcome& outcome,
                                 Command* command) -> std::optional<core::Duration> {
    if (i == 1) return std::nullopt;
    EXPECT_EQ(outcome.output, std::to_string(runs) + "\n");
    EXPECT_EQ(outcome.end.value, 5);
    if (++runs == 3) return std::nullopt;
    *command = Shell("echo " + std::to_string(runs) + "; exit 5");
    return std::chrono::milliseconds(10);
  };
  int signal = 0;
  const auto outcomes =
      RunCommands({Shell("echo 0; exit 5"), Shell("echo once")}, seconds(30), 1, &signal, again);
  EXPECT_EQ(runs, 3);
  EXPECT_EQ(outcomes[0].output, "2\n");
  EXPECT_EQ(outcomes[1].output, "once\n");
}

TEST(RunCommandsTest, ASignalEndsThePauseBeforeOneIsRunAgain) {
  const RunAgain again = [](std::size_t, const CommandOutcome&,
                            Command*) -> std::optional<core::Duration> {
    raise(SIGTERM);
    return seconds(600);
  };
  int signal = 0;
  RunCommands({Shell("true")}, seconds(30), 1, &signal, again);
  EXPECT_EQ(signal, SIGTERM);
}

TEST(RunCommandsTest, LaterASignalDoesAgainWhatItDid) {
  Outcomes({Shell("true")}, seconds(30));
  EXPECT_EXIT(raise(SIGINT), testing::KilledBySignal(SIGINT), "");
}

}  // namespace
}  // namespace sirtaki::launch
