#include "launch/elastic/history.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <string>

namespace sirtaki::launch {
namespace {

namespace fs = std::filesystem;

using Kind = GenerationNote::Kind;

class HistoryTest : public testing::Test {
 protected:
  HistoryTest() {
    std::string name = (fs::temp_directory_path() / "history.XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~HistoryTest() override { fs::remove_all(folder_); }

  bool Has(const std::string& file) const { return fs::exists(folder_ / file); }

  fs::path folder_;
};

// The ranks read Horovod's variable as well, and records lie where the option says.
TEST_F(HistoryTest, LiesWhereTheRanksWrite) {
  LaunchOptions options;
  options.knobs["SIRTAKI_FLIGHT_RECORDS"] = (folder_ / "records").string();
  History history(options, {{"HOROVOD_TIMELINE", (folder_ / "traces").string()}});
  history.Write({.kind = Kind::kDecided, .generation = 1, .workers = {0}, .on = {"h1"}});
  EXPECT_TRUE(Has("traces/generations.jsonl"));
  EXPECT_FALSE(Has("records/generations.jsonl")) << "there is nothing to explain";
  history.Write({.kind = Kind::kOver, .generation = 1, .text = "worker 0 is lost"});
  EXPECT_TRUE(Has("records/generations.jsonl"));
}

TEST_F(HistoryTest, IsBesideATimelineOfOneFileAndNowhereIfItIsSwitchedOff) {
  LaunchOptions options;
  options.knobs["SIRTAKI_FLIGHT_RECORDS"] = "off";
  options.knobs["SIRTAKI_TIMELINE"] = (folder_ / "one" / "trace.json").string();
  History history(options, {});
  history.Write({.kind = Kind::kOver, .generation = 1, .text = "worker 0 is lost"});
  EXPECT_TRUE(Has("one/generations.jsonl"));
  const auto files = fs::recursive_directory_iterator(folder_);
  EXPECT_EQ(std::count_if(begin(files), end(files),
                          [](const auto& file) { return file.is_regular_file(); }),
            1)
      << "there is no other";
}

}  // namespace
}  // namespace sirtaki::launch
