#include "core/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace sirtaki::core {
namespace {

using ::testing::ElementsAre;
using ::testing::MatchesRegex;
using ::testing::Pair;

class LogTest : public ::testing::Test {
 protected:
  LogTest() {
    SetLogSink(
        [this](LogLevel level, const std::string& line) { lines_.emplace_back(level, line); });
  }
  ~LogTest() override {
    SetLogSink(nullptr);
    ConfigureLog({});
  }
  std::vector<std::pair<LogLevel, std::string>> lines_;
};

TEST_F(LogTest, LinesCarryLevelRankAndHost) {
  ConfigureLog({LogLevel::kInfo, false, {3, "node7"}});
  Log(LogLevel::kInfo, "started");
  Log(LogLevel::kError, "lost {} %s");
  EXPECT_THAT(lines_,
              ElementsAre(Pair(LogLevel::kInfo, "[sirtaki] [info] [3@node7] started"),
                          Pair(LogLevel::kError, "[sirtaki] [error] [3@node7] lost {} %s")));
}

TEST_F(LogTest, AMessageIsOneLineWhateverIsInIt) {
  ConfigureLog({LogLevel::kInfo, false, {}});
  Log(LogLevel::kError, "a\nb\x1b[31m\xff \"c\\n\"");
  EXPECT_THAT(lines_, ElementsAre(Pair(LogLevel::kError,
                                       "[sirtaki] [error] a\\nb\\x1b[31m\\xff \"c\\n\"")));
}

TEST_F(LogTest, LinesCarryNoRankBeforeItIsKnown) {
  ConfigureLog({LogLevel::kWarning, false, {}});
  Log(LogLevel::kWarning, "early");
  EXPECT_THAT(lines_, ElementsAre(Pair(LogLevel::kWarning, "[sirtaki] [warning] early")));
}

TEST_F(LogTest, AnAnswerIsShownWhereWarningsAre) {
  ConfigureLog({LogLevel::kWarning, false, {}});
  Log(LogLevel::kInfo, "news");
  LogAnswer("what was asked for");
  ConfigureLog({LogLevel::kError, false, {}});
  LogAnswer("not this");
  EXPECT_THAT(lines_, ElementsAre(Pair(LogLevel::kInfo, "[sirtaki] [info] what was asked for")));
}

TEST_F(LogTest, TimeCanBeShown) {
  ConfigureLog({LogLevel::kWarning, true, {}});
  Log(LogLevel::kWarning, "x");
  ASSERT_EQ(lines_.size(), 1U);
  EXPECT_THAT(lines_[0].second,
              MatchesRegex("\\[....-..-.. ..:..:..\\.......\\] \\[sirtaki\\] \\[warning\\] x"));
}

TEST_F(LogTest, LevelsBelowTheSettingAreDropped) {
  ConfigureLog({LogLevel::kError, false, {}});
  Log(LogLevel::kWarning, "dropped");
  Log(LogLevel::kError, "kept");
  EXPECT_THAT(lines_, ElementsAre(Pair(LogLevel::kError, "[sirtaki] [error] kept")));
}

TEST_F(LogTest, OffDropsEverything) {
  ConfigureLog({LogLevel::kOff, false, {}});
  Log(LogLevel::kError, "dropped");
  Log(LogLevel::kOff, "no level of a message");
  EXPECT_TRUE(lines_.empty());
  EXPECT_FALSE(LogEnabled(LogLevel::kError));
}

TEST_F(LogTest, TextIsMadeOnlyIfTheLevelIsEnabled) {
  ConfigureLog({LogLevel::kInfo, false, {}});
  int made = 0;
  const auto make = [&made] { return ++made; };
  SIRTAKI_LOG(kDebug, "value " << make());
  EXPECT_EQ(made, 0);
  SIRTAKI_LOG(kInfo, "value " << make());
  EXPECT_THAT(lines_, ElementsAre(Pair(LogLevel::kInfo, "[sirtaki] [info] value 1")));
}

TEST_F(LogTest, LinesOfManyThreadsStayWhole) {
  ConfigureLog({LogLevel::kInfo, false, {}});
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int j = 0; j < 100; ++j) Log(LogLevel::kInfo, "line");
    });
  }
  for (int i = 0; i < 20; ++i) ConfigureLog({LogLevel::kInfo, false, {}});  // replaced meanwhile
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(lines_.size(), 400U);
  for (const auto& [level, line] : lines_) EXPECT_EQ(line, "[sirtaki] [info] line");
}

TEST_F(LogTest, ASinkThatThrowsHarmsNobody) {
  SetLogSink([](LogLevel, const std::string&) { throw std::runtime_error("full"); });
  ::testing::internal::CaptureStderr();
  Log(LogLevel::kError, "x");
  ::testing::internal::GetCapturedStderr();  // the logging library may complain there
}

TEST(LogStderrTest, GoesToStandardErrorByDefault) {
  ConfigureLog({LogLevel::kWarning, false, {2, "b"}});
  ::testing::internal::CaptureStderr();
  Log(LogLevel::kWarning, "seen");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "[sirtaki] [warning] [2@b] seen\n");
  ConfigureLog({});
}

}  // namespace
}  // namespace sirtaki::core
