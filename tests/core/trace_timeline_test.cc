#include "core/trace/timeline.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
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
  const std::size_t names = Read().size();
  for (std::size_t i = 1; i <= 50; ++i) {
    const std::vector<Event> events = {At(EventKind::kMark, 2000, 2000, "here")};
    ASSERT_TRUE(file.Append(events).ok());
    ASSERT_EQ(Read().size(), names + i);
  }
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
  EXPECT_EQ(line["pid"], 2);
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
