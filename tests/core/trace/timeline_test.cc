#include "core/trace/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace sirtaki::core::trace {
namespace {

using nlohmann::json;
using std::chrono::microseconds;
using std::chrono::nanoseconds;

class TimelineTest : public testing::Test {
 protected:
  TimelineTest() {
    std::string folder = testing::TempDir() + "timeline.XXXXXX";
    folder_ = mkdtemp(folder.data());
  }
  ~TimelineTest() override { std::filesystem::remove_all(folder_); }

  std::string Path() const { return (folder_ / "rank-2.json").string(); }
  json Read() const {
    std::ifstream file(Path());
    std::stringstream text;
    text << file.rdbuf();
    return json::parse(text.str());  // strictly: it throws
  }

  static Event At(EventKind kind, int begin_us, int end_us, std::string_view text) {
    Event event;
    event.kind = kind;
    event.begin = TimePoint(microseconds(begin_us));
    event.end = TimePoint(microseconds(end_us));
    event.SetText(text);
    return event;
  }

  std::filesystem::path folder_;
  TimelineIdentity identity_{2, "b", microseconds(-100), TimePoint(microseconds(1000))};
};

TEST_F(TimelineTest, IsAWholeArrayAfterEveryWrite) {
  TimelineFile file;
  ASSERT_TRUE(file.Open(Path(), identity_, 0).ok());
  const std::vector<Event> events = {At(EventKind::kMark, 2000, 2000, "here")};
  ASSERT_TRUE(file.Append(events).ok());
  const std::size_t first = Read().size();
  for (std::size_t i = 1; i <= 50; ++i) {
    ASSERT_TRUE(file.Append(events).ok());
    ASSERT_EQ(Read().size(), first + i);
  }
}

TEST_F(TimelineTest, BeginsWithTheRunThatItIsOf) {
  TimelineFile file;
  identity_.session = "5eed";
  ASSERT_TRUE(file.Open(Path(), identity_, 0).ok());
  EXPECT_EQ(Read().front()["name"], "process_name");
  EXPECT_EQ(Read().front()["args"]["session"], "5eed");
}

TEST_F(TimelineTest, BeginsWithItsHostAndWhatTheClockThereWasAtTimeZero) {
  TimelineFile file;
  identity_.host = "h";
  identity_.origin = TimePoint(std::chrono::seconds(7));
  identity_.offset = std::chrono::seconds(2);  // rank 0's clock is ahead
  ASSERT_TRUE(file.Open(Path(), identity_, 0).ok());
  EXPECT_EQ(Read().front()["args"]["host"], "h");
  EXPECT_EQ(Read().front()["args"]["zero"], 5'000'000'000);
}

TEST_F(TimelineTest, TracksHaveNamesOnce) {
  TimelineFile file;
  ASSERT_TRUE(file.Open(Path(), identity_, 0).ok());
  Event of_gpu = At(EventKind::kMove, 1, 2, "nccl");
  of_gpu.track = Track::kDevice;
  of_gpu.thread = 1;
  Event of_thread = At(EventKind::kMark, 1, 1, "here");
  of_thread.thread = 4;
  Event of_lane = At(EventKind::kMove, 1, 2, "shm");
  of_lane.track = Track::kLargeLane;
  const std::vector<Event> events = {of_gpu, of_thread, of_lane, of_gpu, of_thread};
  ASSERT_TRUE(file.Append(events).ok());
  std::map<int, std::string> names;
  for (const json& line : Read()) {
    if (line["name"] != "thread_name") continue;
    EXPECT_TRUE(names.emplace(line["tid"], line["args"]["name"]).second) << line;
  }
  ASSERT_EQ(names.size(), 3U);
  std::set<std::string> all;
  for (const json& line : Read()) {
    if (line["ph"] != "M") all.insert(names.at(line["tid"]));
  }
  EXPECT_EQ(all, (std::set<std::string>{"GPU 1", "large lane", "thread 4"}));
}

TEST_F(TimelineTest, PipelinesHaveTracksOfTheirOwn) {
  TimelineFile file;
  ASSERT_TRUE(file.Open(Path(), identity_, 0).ok());
  std::vector<Event> events = {
      At(EventKind::kBubble, 1, 2, "F1.2"), At(EventKind::kPass, 2, 3, "F1.2"),
      At(EventKind::kReduce, 3, 4, "T:wte"), At(EventKind::kBatch, 1, 4, "p"),
      At(EventKind::kPass, 2, 3, "F0.0")};
  for (Event& event : events) {
    event.track = Track::kPipeline;
    event.thread = 1;
  }
  events.back().thread = 3;
  ASSERT_TRUE(file.Append(events).ok());
  std::map<int, std::string> tracks;
  std::vector<std::string> told;
  for (const json& line : Read()) {
    if (line["name"] == "thread_name") tracks[line["tid"]] = line["args"]["name"];
    if (line["ph"] != "X") continue;
    told.push_back(tracks.at(line["tid"]) + ": " + line["cat"].get<std::string>() + " " +
                   line["name"].get<std::string>());
  }
  EXPECT_EQ(told,
            (std::vector<std::string>{"pipeline: bubble bubble: F1.2", "pipeline: pass F1.2",
                                      "pipeline: reduce reduce: T:wte", "pipeline: batch batch: p",
                                      "pipeline of thread 3: pass F0.0"}));
}

TEST_F(TimelineTest, TimesAreThoseOfRankZero) {
  TimelineFile file;
  ASSERT_TRUE(file.Open(Path(), identity_, 0).ok());
  Event pack = At(EventKind::kPack, 2000, 2010, "");
  pack.begin += nanoseconds(7);
  pack.track = Track::kLargeLane;
  pack.bytes = 4096;
  ASSERT_TRUE(file.Append(std::vector<Event>{pack}).ok());
  const json line = Read().back();
  EXPECT_EQ(line["ph"], "X");
  EXPECT_EQ(line["pid"], 3);  // 0 is none
  EXPECT_DOUBLE_EQ(line["ts"].get<double>(), 900.007);
  EXPECT_DOUBLE_EQ(line["dur"].get<double>(), 9.993);
  EXPECT_EQ(line["args"]["bytes"], 4096);
  EXPECT_EQ(line["name"], "pack");
}

TEST_F(TimelineTest, NegotiationsOverlapSoTheyBeginAndEndByNumber) {
  TimelineFile file;
  ASSERT_TRUE(file.Open(Path(), identity_, 0).ok());
  Event event = At(EventKind::kNegotiate, 2000, 2010, "\"w\"");
  event.track = Track::kNegotiation;
  event.number = 7;
  ASSERT_TRUE(file.Append(std::vector<Event>{event}).ok());
  const json all = Read();
  const json& begin = all[all.size() - 2];
  const json& end = all.back();
  EXPECT_EQ(begin["ph"], "b");
  EXPECT_EQ(end["ph"], "e");
  EXPECT_EQ(begin["id2"], end["id2"]);
  EXPECT_EQ(begin["cat"], end["cat"]);
  EXPECT_EQ(begin["name"], "\"w\"");
  EXPECT_LT(begin["ts"], end["ts"]);
}

TEST_F(TimelineTest, WhatNeverEndsHasABarToo) {
  TimelineFile file;
  ASSERT_TRUE(file.Open(Path(), identity_, 0).ok());
  const auto of_call = [](EventKind kind, int end_us, std::string_view name) {
    Event event = At(kind, 2000, end_us, name);
    event.track = Track::kNegotiation;
    return event;
  };
  const auto of_group = [](EventKind kind, Track track, int end_us) {
    Event event = At(kind, 2000, end_us, "all-reduce");
    event.track = track;
    event.number = 4;
    return event;
  };
  // Two of each begin at the same time, and one ends.
  Event other = of_group(EventKind::kBegin, Track::kSmallLane, 2000);
  other.number = 5;
  ASSERT_TRUE(
      file.Append(std::vector<Event>{of_call(EventKind::kSubmit, 2000, "\"v\""),
                                     of_call(EventKind::kSubmit, 2000, "\"w\""),
                                     of_call(EventKind::kNegotiate, 2010, "\"w\""),
                                     of_group(EventKind::kBegin, Track::kSmallLane, 2000), other,
                                     of_group(EventKind::kFinish, Track::kSmallLane, 2010),
                                     of_group(EventKind::kBegin, Track::kLargeLane, 2000)})
          .ok());
  std::map<std::string, std::string> open;  // id, name
  std::string phases;
  for (const json& line : Read()) {
    const auto phase = line["ph"].get<std::string>();
    if (phase == "M") continue;
    phases += phase;
    if (phase == "b") open[line["id2"]["local"]] = line["name"];
    if (phase == "e") {
      EXPECT_EQ(open.erase(line["id2"]["local"]), 1U) << line;
    }
  }
  EXPECT_EQ(phases, "bbebbeB");
  ASSERT_EQ(open.size(), 2U);
  EXPECT_EQ(std::count_if(open.begin(), open.end(),
                          [](const auto& bar) { return bar.second == "\"v\""; }),
            1);
  ASSERT_TRUE(
      file.Append(std::vector<Event>{of_group(EventKind::kFinish, Track::kLargeLane, 2010)}).ok());
  EXPECT_EQ(Read().back()["ph"], "E");
  EXPECT_DOUBLE_EQ(Read().back()["ts"].get<double>(), 910);
}

TEST_F(TimelineTest, AMessageIsAnInstantSinceNobodyAgreesOnIt) {
  TimelineFile file;
  ASSERT_TRUE(file.Open(Path(), identity_, 0).ok());
  Event message = At(EventKind::kSubmit, 2000, 2000, "#1: send to rank 1, tag 3");
  message.track = Track::kNegotiation;
  message.alone = 1;
  ASSERT_TRUE(file.Append(std::vector<Event>{message}).ok());
  EXPECT_EQ(Read().back()["ph"], "i");
  EXPECT_EQ(Read().back()["cat"], "submit");
}

TEST_F(TimelineTest, GroupsOfTheSmallLaneOverlapToo) {
  TimelineFile file;
  ASSERT_TRUE(file.Open(Path(), identity_, 0).ok());
  Event first = At(EventKind::kFinish, 2000, 2010, "all-reduce of \"a\"");
  first.track = Track::kSmallLane;
  first.number = 1;
  Event second = At(EventKind::kFinish, 2000, 2020, "all-reduce of \"b\"");
  second.track = Track::kSmallLane;
  second.number = 2;
  ASSERT_TRUE(file.Append(std::vector<Event>{first, second}).ok());
  const json all = Read();
  std::string phases;
  for (std::size_t i = all.size() - 4; i < all.size(); ++i) {
    phases += all[i]["ph"].get<std::string>();
  }
  EXPECT_EQ(phases, "bebe");
  EXPECT_NE(all[all.size() - 4]["id2"], all[all.size() - 2]["id2"]);
}

TEST_F(TimelineTest, NamesAreEscaped) {
  TimelineFile file;
  identity_.host = "a\"b\\";
  ASSERT_TRUE(file.Open(Path(), identity_, 0).ok());
  const std::string name = "quote\" back\\ line\n bell\x07 bad\xff";
  ASSERT_TRUE(file.Append(std::vector<Event>{At(EventKind::kMark, 1, 1, name)}).ok());
  const json all = Read();
  EXPECT_EQ(all.back()["name"], "quote\" back\\ line\n bell\x07 bad\uFFFD");
  EXPECT_EQ(all.front()["args"]["name"], "rank 2 on a\"b\\");
}

TEST_F(TimelineTest, StaysWithinItsSize) {
  TimelineFile file;
  ASSERT_TRUE(file.Open(Path(), identity_, 4000).ok());
  const std::vector<Event> events(100, At(EventKind::kMark, 1, 1, "again"));
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(file.Append(events).ok());
  EXPECT_LE(std::filesystem::file_size(Path()), 4000U);
  EXPECT_GT(std::filesystem::file_size(Path()), 3000U);
  EXPECT_EQ(Read().back()["name"], "the timeline is full: what comes after this is not in it");
  EXPECT_DOUBLE_EQ(Read().back()["ts"].get<double>(), 1 - 100 - 1000);
  EXPECT_TRUE(file.is_full());
}

TEST_F(TimelineTest, OfWhatOverlapsBothEndsFitOrNone) {
  Event event = At(EventKind::kNegotiate, 1, 2, "again");
  event.track = Track::kNegotiation;
  const std::vector<Event> events(50, event);
  for (std::int64_t most = 1500; most < 2000; most += 20) {
    TimelineFile file;
    ASSERT_TRUE(file.Open(Path(), identity_, most).ok());
    ASSERT_TRUE(file.Append(events).ok());
    int open = 0;
    for (const json& line : Read()) open += line["ph"] == "b" ? 1 : line["ph"] == "e" ? -1 : 0;
    EXPECT_EQ(open, 0) << most;
  }
}

TEST_F(TimelineTest, AFolderThatIsNotThereIsNamed) {
  TimelineFile file;
  const Status status = file.Open(Path() + ".d/x.json", identity_, 0);
  EXPECT_NE(status.message().find(Path() + ".d/x.json"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("No such file"), std::string::npos) << status.message();
  EXPECT_FALSE(file.is_open());
}

TEST_F(TimelineTest, ADeviceThatIsFullIsTold) {
  TimelineFile file;
  const Status status = file.Open("/dev/full", identity_, 0);
  EXPECT_FALSE(status.ok());
  EXPECT_FALSE(file.is_open());
  EXPECT_TRUE(file.Append(std::vector<Event>{At(EventKind::kMark, 1, 1, "x")}).ok());
}

}  // namespace
}  // namespace sirtaki::core::trace
