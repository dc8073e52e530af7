#include "launch/job/course.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <sstream>
#include <string>

namespace sirtaki::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::array<const char*, 6> kPhases = {"starting", "running",     "failing",
                                                "stopping", "terminating", "killed"};
constexpr std::array<const char*, 6> kDues = {"nothing",    "judge start",        "judge init",
                                              "stop ranks", "terminate launcher", "kill launcher"};

// Plays a run of two ranks, which may take 30 s to start. A line of the script is a time in seconds and what happens then. Gives
// what is due, with its time and the phase that follows, up to a minute; "farewell": the ranks have had their time for last
// words.
std::string Played(const std::string& script) {
  const core::TimePoint start;
  Course course(2, start, seconds(30));
  std::ostringstream log;
  bool hears = false;
  const auto tell = [&](core::TimePoint now, const std::string& what) {
    log << std::chrono::duration<double>(now - start).count() << " " << what << ": "
        << kPhases.at(static_cast<std::size_t>(course.phase())) << "\n";
  };
  const auto pass = [&](core::TimePoint until) {
    while (course.NextTime() <= until) {
      const core::TimePoint now = course.NextTime();
      const Due due = course.TakeDue(now);
      if (due != Due::kNothing) tell(now, kDues.at(static_cast<std::size_t>(due)));
      if (hears && !course.hears_ranks()) tell(now, "farewell");
      hears = course.hears_ranks();
    }
  };
  std::istringstream lines(script);
  double time = 0;
  std::string event;
  while (lines >> time && std::getline(lines >> std::ws, event)) {
    const auto now = start + milliseconds(static_cast<int>(time * 1000));
    pass(now);
    if (event == "rank arrives" && course.Arrive()) tell(now, "go");
    if (event == "all in init") course.NoteInit(true, false, now);
    if (event == "all through init") course.NoteInit(true, true, now);
    if (event == "rank fails") course.Fail(now);
    if (event == "wrong rank") course.Fail(now, seconds(0));
    if (event == "signal" && course.TakeSignal(now)) tell(now, "kill launcher");
    if (event == "launcher ends") course.NoteLauncherEnd(false, now);
    if (event == "launcher ends, to restart") course.NoteLauncherEnd(true, now);
    hears = course.hears_ranks();
  }
  pass(start + seconds(60));
  return log.str();
}

TEST(CourseTest, ARunThatEndsWellWaitsForNothing) {
  EXPECT_EQ(Played("1 rank arrives\n"
                   "2 rank arrives\n"
                   "3 all in init\n"
                   "4 all through init\n"
                   "50 launcher ends\n"),
            "2 go: running\n"
            "52 farewell: running\n");
}

TEST(CourseTest, ALateStartIsAFailureAndIsEndedStepByStep) {
  EXPECT_EQ(Played("1 rank arrives\n"),
            "30 judge start: failing\n"
            "30 stop ranks: stopping\n"
            "34 terminate launcher: terminating\n"
            "37 kill launcher: killed\n");
}

TEST(CourseTest, WhereNoRankIsThereTheLauncherIsToldAtOnce) {
  EXPECT_EQ(Played("1 signal\n"),
            "1 stop ranks: stopping\n"
            "1 terminate launcher: terminating\n"
            "4 kill launcher: killed\n");
}

TEST(CourseTest, AProgramThatHangsInInitIsAFailure) {
  EXPECT_EQ(Played("1 rank arrives\n"
                   "2 rank arrives\n"
                   "3 all in init\n"
                   "4 all in init\n"),
            "2 go: running\n"
            "33 judge init: failing\n"
            "33 stop ranks: stopping\n"
            "37 terminate launcher: terminating\n"
            "40 kill launcher: killed\n");
}

TEST(CourseTest, AProgramThatNeverComesToInitIsNotHurried) {
  EXPECT_EQ(Played("1 rank arrives\n"
                   "2 rank arrives\n"),
            "2 go: running\n");
}

TEST(CourseTest, TheLauncherHasTimeToEndTheOthersAfterAFailure) {
  EXPECT_EQ(Played("1 rank arrives\n"
                   "2 rank arrives\n"
                   "3 rank fails\n"
                   "4 rank fails\n"
                   "5.5 launcher ends\n"),
            "2 go: running\n"
            "5 stop ranks: stopping\n"
            "7.5 farewell: stopping\n"
            "9 terminate launcher: terminating\n"
            "12 kill launcher: killed\n");
}

TEST(CourseTest, ASignalCutsThatTimeShort) {
  EXPECT_EQ(Played("1 rank arrives\n"
                   "2 rank arrives\n"
                   "3 rank fails\n"
                   "4 signal\n"
                   "4.5 launcher ends\n"),
            "2 go: running\n"
            "4 stop ranks: stopping\n"
            "6.5 farewell: stopping\n"
            "8 terminate launcher: terminating\n"
            "11 kill launcher: killed\n");
}

TEST(CourseTest, TwoSignalsAtOnceAreOneAndALaterOneKills) {
  EXPECT_EQ(Played("1 rank arrives\n"
                   "2 rank arrives\n"
                   "3 signal\n"
                   "3.9 signal\n"
                   "4 signal\n"
                   "4.1 signal\n"),
            "2 go: running\n"
            "3 stop ranks: stopping\n"
            "4 kill launcher: killed\n"
            "4.1 kill launcher: killed\n");
}

TEST(CourseTest, ASignalAfterAllIsOverKillsAtOnce) {
  EXPECT_EQ(Played("40 signal\n"),
            "30 judge start: failing\n"
            "30 stop ranks: stopping\n"
            "30 terminate launcher: terminating\n"
            "33 kill launcher: killed\n"
            "40 kill launcher: killed\n");
}

TEST(CourseTest, NobodyBeginsOnceTheRunHasFailed) {
  EXPECT_EQ(Played("1 rank arrives\n"
                   "2 wrong rank\n"
                   "2 rank arrives\n"),
            "2 stop ranks: stopping\n"
            "6 terminate launcher: terminating\n"
            "9 kill launcher: killed\n");
}

TEST(CourseTest, ARankThatWasEndedBeforeItBeganGivesTheLauncherTimeToo) {
  EXPECT_EQ(Played("1 rank arrives\n"
                   "1 rank fails\n"
                   "2 launcher ends, to restart\n"),
            "3 stop ranks: stopping\n"
            "7 terminate launcher: terminating\n"
            "10 kill launcher: killed\n"
            "10 farewell: killed\n");
}

TEST(CourseTest, ASilentHostIsWaitedForWhereTheRunMayStartAgain) {
  EXPECT_EQ(Played("1 rank arrives\n"
                   "2 rank arrives\n"
                   "3 launcher ends, to restart\n"),
            "2 go: running\n"
            "17 farewell: running\n");
}

}  // namespace
}  // namespace sirtaki::launch
