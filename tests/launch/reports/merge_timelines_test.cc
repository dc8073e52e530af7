#include "launch/reports/merge_timelines.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/trace/timeline.h"

namespace sirtaki::launch {
namespace {

using core::trace::Event;
using core::trace::TimelineFile;

class MergeTimelinesTest : public testing::Test {
 protected:
  MergeTimelinesTest() {
    std::string folder = testing::TempDir() + "merge.XXXXXX";
    folder_ = mkdtemp(folder.data());
  }
  ~MergeTimelinesTest() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return (folder_ / name).string(); }

  void WriteRank(int rank, int marks, const std::string& session = "5eed") const {
    TimelineFile file;
    ASSERT_TRUE(
        file.Open(Path("rank-" + std::to_string(rank) + ".json"), {rank, "h", {}, {}, session}, 0)
            .ok());
    for (int i = 0; i < marks; ++i) {
      Event event;
      event.SetText("mark " + std::to_string(i));
      ASSERT_TRUE(file.Append(std::vector<Event>{event}).ok());
    }
  }
  nlohmann::json Merged() const {
    std::ifstream file(Path("all.json"));
    return nlohmann::json::parse(file);
  }
  int Marks(int rank) const {
    int marks = 0;
    for (const auto& line : Merged()) marks += line["pid"] == rank + 1 && line["ph"] == "i" ? 1 : 0;
    return marks;
  }
  core::Status Merge() {
    std::vector<TimelinePart> parts;
    notes_.clear();
    core::Status status = FindTimelines(folder_.string(), &parts, &notes_);
    return status.ok() ? MergeTimelines(parts, {}, Path("all.json")) : status;
  }

  std::filesystem::path folder_;
  std::vector<std::string> notes_;  // of the last Merge
};

TEST_F(MergeTimelinesTest, HoldsTheLinesOfAllRanks) {
  for (const int rank : {0, 2, 10}) WriteRank(rank, rank + 1);
  ASSERT_TRUE(Merge().ok());
  for (const int rank : {0, 2, 10}) EXPECT_EQ(Marks(rank), rank + 1);
  ASSERT_TRUE(Merge().ok());  // what it wrote is none of the ranks'
  EXPECT_EQ(Marks(10), 11);
}

TEST_F(MergeTimelinesTest, RanksAreInOrder) {
  for (const int rank : {10, 2, 0}) WriteRank(rank, 1);
  std::vector<TimelinePart> parts;
  ASSERT_TRUE(FindTimelines(folder_.string(), &parts, &notes_).ok());
  std::vector<std::string> paths;
  for (const TimelinePart& part : parts) paths.push_back(part.path);
  EXPECT_EQ(paths, (std::vector<std::string>{Path("rank-0.json"), Path("rank-2.json"),
                                             Path("rank-10.json")}));
}

TEST_F(MergeTimelinesTest, OneThatWasCutOffAnywhereGivesWhatIsWhole) {
  WriteRank(0, 1);
  WriteRank(1, 20);
  const auto whole = std::filesystem::file_size(Path("rank-1.json"));
  int before = 0;
  for (std::uintmax_t size = 0; size <= whole; size += 13) {
    WriteRank(1, 20);
    std::filesystem::resize_file(Path("rank-1.json"), size);
    ASSERT_TRUE(Merge().ok()) << size;
    EXPECT_TRUE(notes_.empty()) << notes_.front();
    EXPECT_EQ(Marks(0), 1);
    EXPECT_GE(Marks(1), before);
    before = Marks(1);
  }
  EXPECT_GE(before, 19);
}

TEST_F(MergeTimelinesTest, WhatIsNoneIsNamedWithItsLine) {
  WriteRank(0, 1);
  std::ofstream(Path("rank-1.json")) << "[\n{\"args\":{\"session\":\"5eed\"}},\nhello\n]\n";
  EXPECT_EQ(Merge().message(), Path("rank-1.json") + ": line 3 is not part of a timeline");
}

// What was written last took the place of the bracket, all but its newline.
TEST_F(MergeTimelinesTest, ACutLineMayEndInANewline) {
  WriteRank(0, 1);
  const std::string line = "{\"pid\":2,\"ph\":\"i\"}";
  for (const std::string end : {",]\n", ",\n{\"pid\n", ",\n{\"pid\n\n"}) {
    std::ofstream(Path("rank-1.json"))
        << "[\n{\"pid\":2,\"ph\":\"M\",\"args\":{\"session\":\"5eed\"}},\n"
        << line << ",\n"
        << line << end;
    ASSERT_TRUE(Merge().ok()) << end;
    EXPECT_GE(Marks(1), 1) << end;
  }
}

TEST_F(MergeTimelinesTest, ThoseOfAnotherRunAreLeftOut) {
  for (const int rank : {0, 1, 2, 3}) WriteRank(rank, 1, "old");
  for (const int rank : {0, 1}) WriteRank(rank, 2, "new");
  ASSERT_TRUE(Merge().ok());
  EXPECT_EQ(Marks(1), 2);
  EXPECT_EQ(Marks(2), 0);
  ASSERT_EQ(notes_.size(), 2U);
  EXPECT_EQ(notes_[0], Path("rank-2.json") + " was left out: it belongs to another run than " +
                           Path("rank-0.json"));
}

TEST_F(MergeTimelinesTest, WhatWasThereStaysIfItFails) {
  WriteRank(0, 1);
  ASSERT_TRUE(Merge().ok());
  std::ofstream(Path("rank-1.json")) << "[\n{},\nhello\n]\n";
  WriteRank(0, 9);
  EXPECT_FALSE(MergeTimelines({{.path = Path("rank-0.json")}, {.path = Path("rank-1.json")}}, {},
                              Path("all.json"))
                   .ok());
  EXPECT_EQ(Marks(0), 1);
  using Entries = std::filesystem::directory_iterator;
  EXPECT_EQ(std::distance(Entries(folder_), Entries()), 3);
}

TEST_F(MergeTimelinesTest, AFolderWithoutAnyIsNamed) {
  EXPECT_EQ(Merge().message(), folder_.string() + ": holds no rank-<number>.json");
  std::vector<TimelinePart> parts;
  EXPECT_NE(FindTimelines(Path("none"), &parts, &notes_).message().find(Path("none")),
            std::string::npos);
}

TEST_F(MergeTimelinesTest, NoTimelineIsOverwritten) {
  WriteRank(0, 3);
  const core::Status status =
      MergeTimelines({{.path = Path("rank-0.json")}}, {}, Path("rank-0.json"));
  EXPECT_NE(status.message().find("is itself one of the timelines"), std::string::npos);
  EXPECT_GT(std::filesystem::file_size(Path("rank-0.json")), 100U);
}

}  // namespace
}  // namespace sirtaki::launch
