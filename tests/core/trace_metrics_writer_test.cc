#include "core/trace/metrics_writer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace sirtaki::core::trace {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;

class MetricsWriterTest : public testing::Test {
 protected:
  MetricsWriterTest() {
    std::string folder = testing::TempDir() + "metrics_writer.XXXXXX";
    folder_ = mkdtemp(folder.data());
  }
  ~MetricsWriterTest() override { std::filesystem::remove_all(folder_); }

  MetricsFileOptions Options(const std::string& name, Duration interval) {
    return {.path = folder_ + "/" + name,
            .rank = 2,
            .host = "a",
            .interval = interval,
            .on_error = [this](const Status& why) { errors_.push_back(why); }};
  }
  std::vector<std::string> Lines(const std::string& name) const {
    std::ifstream file(folder_ + "/" + name);
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }

  std::string folder_;
  std::vector<Status> errors_;
  ObserverPtr observer_ = std::make_shared<Observer>();
  MetricsWriter writer_{observer_};
};

TEST_F(MetricsWriterTest, TheEndWritesALineOfWhatThereIsThen) {
  ASSERT_TRUE(writer_.Start(Options("new/m.csv", hours(1))).ok());
  observer_->metrics.Add(Metric::kSteps, std::int64_t{7});
  writer_.Stop();
  writer_.Stop();
  const std::vector<std::string> lines = Lines("new/m.csv");
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0].substr(0, 24), "unix_seconds,rank,steps,");
  EXPECT_NE(lines[1].find(",2,7,"), std::string::npos) << lines[1];
  EXPECT_TRUE(errors_.empty());
}

TEST_F(MetricsWriterTest, LinesComeAtTheInterval) {
  ASSERT_TRUE(writer_.Start(Options("m.csv", milliseconds(1))).ok());
  const TimePoint limit = Clock::now() + seconds(30);
  while (Lines("m.csv").size() < 4 && Clock::now() < limit) std::this_thread::yield();
  EXPECT_GE(Lines("m.csv").size(), 4U);
}

TEST_F(MetricsWriterTest, ThePrometheusTextIsReplaced) {
  observer_->metrics.Add(Metric::kCalls, std::int64_t{1});
  ASSERT_TRUE(writer_.Start(Options("m.prom", hours(1))).ok());
  const std::size_t lines = Lines("m.prom").size();
  observer_->metrics.Add(Metric::kCalls, std::int64_t{4});
  writer_.Stop();
  EXPECT_EQ(Lines("m.prom").size(), lines);
  bool found = false;
  for (const std::string& line : Lines("m.prom")) {
    found |= line == "sirtaki_calls_total{rank=\"2\",host=\"a\"} 5";
  }
  EXPECT_TRUE(found);
}

TEST_F(MetricsWriterTest, AFileThatCannotBeWrittenIsToldOnce) {
  ASSERT_TRUE(writer_.Start(Options("folder/m.csv", milliseconds(1))).ok());
  std::filesystem::remove_all(folder_ + "/folder");
  writer_.Stop();  // writes at least once more
  ASSERT_EQ(errors_.size(), 1U);
  EXPECT_EQ(errors_[0].message(), "the metrics \"" + folder_ +
                                      "/folder/m.csv\" cannot be written: No such file or "
                                      "directory");
}

TEST_F(MetricsWriterTest, AFileThatCannotBeMadeDoesNotStartIt) {
  std::ofstream(folder_ + "/file") << "x";
  const Status status = writer_.Start(Options("file/m.csv", hours(1)));
  EXPECT_EQ(status.message(),
            "the folder \"" + folder_ + "/file\" cannot be made: Not a directory");
  writer_.Stop();
}

}  // namespace
}  // namespace sirtaki::core::trace
