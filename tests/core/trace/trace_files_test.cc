#include "core/trace/trace_files.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace sirtaki::core::trace {
namespace {

namespace fs = std::filesystem;

class TraceFilesTest : public testing::Test {
 protected:
  TraceFilesTest() {
    std::string folder = testing::TempDir() + "trace_files.XXXXXX";
    folder_ = mkdtemp(folder.data());
  }
  ~TraceFilesTest() override { fs::remove_all(folder_); }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  static std::string TextOf(const std::string& path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }

  std::string folder_;
};

TEST_F(TraceFilesTest, EachRankHasItsFiles) {
  EXPECT_EQ(TimelinePath("traces", 3), "traces/rank-3.json");
  EXPECT_EQ(TimelinePath("a/b/", 0), "a/b/rank-0.json");
  EXPECT_EQ(FlightRecordPath("records", 12), "records/flight-12.json");
  EXPECT_EQ(MetricsPath("out/metrics.csv", 3), "out/metrics.3.csv");
  EXPECT_EQ(MetricsPath("a.b/metrics", 0), "a.b/metrics.0");
  EXPECT_EQ(MetricsPath("sirtaki.prom", 1), "sirtaki.1.prom");
}

TEST_F(TraceFilesTest, ATimelineThatIsAFileIsOfRankZero) {
  EXPECT_EQ(TimelinePath("trace.json", 0), "trace.json");
  EXPECT_EQ(TimelinePath("trace.json", 1), "");
  EXPECT_EQ(TimelinePath("", 0), "");
}

TEST_F(TraceFilesTest, AGenerationHasAFolderInThatOfTheOption) {
  EXPECT_EQ(TimelineOfGeneration("traces", 3), "traces/generation-3");
  EXPECT_EQ(TimelineOfGeneration("out/trace.json", 12), "out/generation-12/trace.json");
  EXPECT_EQ(TimelineOfGeneration("", 1), "");
  EXPECT_EQ(MetricsOfGeneration("out/metrics.csv", 12), "out/generation-12/metrics.csv");
  EXPECT_EQ(MetricsOfGeneration("out/metrics.prom", 12), "out/metrics.prom");
  EXPECT_EQ(MetricsOfGeneration("", 1), "");
}

TEST_F(TraceFilesTest, AFileIsReplacedWholeAndItsFoldersAreMade) {
  const std::string path = Path("new/deep/file");
  ASSERT_TRUE(ReplaceFile(path, "a longer first text").ok());
  ASSERT_TRUE(ReplaceFile(path, "second").ok());
  EXPECT_EQ(TextOf(path), "second");
  EXPECT_EQ(std::distance(fs::directory_iterator(fs::path(path).parent_path()), {}), 1);
}

TEST_F(TraceFilesTest, WhatCannotBeMadeIsNamed) {
  ASSERT_TRUE(ReplaceFile(Path("file"), "x").ok());
  const Status no_folder = ReplaceFile(Path("file/below"), "y");
  EXPECT_EQ(no_folder.code(), StatusCode::kBackend);
  EXPECT_EQ(no_folder.message(),
            "the folder \"" + Path("file") + "\" cannot be made: Not a directory");
  fs::create_directory(Path("folder"));
  const Status no_file = ReplaceFile(Path("folder"), "y");
  EXPECT_EQ(no_file.message(), "\"" + Path("folder") + "\" cannot be written: Is a directory");
  EXPECT_EQ(TextOf(Path("file")), "x");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 2);
}

TEST_F(TraceFilesTest, AFileIsSetAsideOnceItIsThere) {
  const std::string path = Path("flight-0.json");
  EXPECT_TRUE(SetAside(path).ok());
  for (const std::string text : {"first", "second"}) {
    ASSERT_TRUE(ReplaceFile(path, text).ok());
    ASSERT_TRUE(SetAside(path).ok());
    EXPECT_FALSE(fs::exists(path));
    EXPECT_EQ(TextOf(Path("previous/flight-0.json")), text);
  }
  fs::remove_all(Path("previous"));
  ASSERT_TRUE(ReplaceFile(Path("previous"), "in the way").ok());
  ASSERT_TRUE(ReplaceFile(path, "third").ok());
  EXPECT_NE(SetAside(path).message().find(Path("previous")), std::string::npos);
  EXPECT_EQ(TextOf(path), "third");
}

}  // namespace
}  // namespace sirtaki::core::trace
