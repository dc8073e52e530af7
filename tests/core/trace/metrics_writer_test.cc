#include "core/trace/metrics_writer.h"
#include "tests/support/within.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <latch>
#include <stdexcept>
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
  ~MetricsWriterTest() override {
    writer_.Stop();  // which would write into the folder as it goes
    std::filesystem::remove_all(folder_);
  }

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
  EXPECT_TRUE(tests::Within(seconds(30), [&] { return Lines("m.csv").size() >= 4; }));
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
  std::latch failed(1);
  MetricsFileOptions options = Options("folder/m.csv", milliseconds(1));
  options.on_error = [&](const Status& why) {
    errors_.push_back(why);
    if (errors_.size() == 1) failed.count_down();
  };
  ASSERT_TRUE(writer_.Start(options).ok());
  std::filesystem::rename(folder_ + "/folder", folder_ + "/elsewhere");
  failed.wait();
  writer_.Stop();  // tries once more at least
  ASSERT_EQ(errors_.size(), 1U);
  EXPECT_EQ(errors_[0].message(), "the metrics \"" + folder_ +
                                      "/folder/m.csv\" cannot be written: No such file or "
                                      "directory");
}

TEST_F(MetricsWriterTest, AFileThatCanBeWrittenAgainGoesOn) {
  std::latch failed(1);
  MetricsFileOptions options = Options("folder/m.csv", milliseconds(1));
  options.on_error = [&](const Status& why) {
    errors_.push_back(why);
    failed.count_down();
  };
  ASSERT_TRUE(writer_.Start(options).ok());
  std::filesystem::rename(folder_ + "/folder", folder_ + "/elsewhere");
  failed.wait();
  std::filesystem::create_directory(folder_ + "/folder");
  EXPECT_TRUE(tests::Within(seconds(30), [&] { return Lines("folder/m.csv").size() >= 3; }));
  writer_.Stop();
  EXPECT_EQ(errors_.size(), 1U);
  EXPECT_EQ(Lines("folder/m.csv")[0], MetricsCsvHead());
}

// A full disk is the case: nothing of a line that could not be written whole stays.
TEST_F(MetricsWriterTest, ALineIsWrittenWholeOrNotAtAll) {
  ASSERT_TRUE(writer_.Start(Options("m.csv", hours(1))).ok());
  const std::size_t head = MetricsCsvHead().size() + 1;
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit little{head + 20, before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &little), 0);
  writer_.Stop();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  ASSERT_EQ(errors_.size(), 1U);
  EXPECT_NE(errors_[0].message().find("File too large"), std::string::npos) << errors_[0].message();
  EXPECT_EQ(std::filesystem::file_size(folder_ + "/m.csv"), head);
}

// A pipe that nobody reads cannot be opened, as a file on a disk that does not answer.
TEST_F(MetricsWriterTest, TheEndLeavesBehindAWriteThatHangs) {
  MetricsFileOptions options = Options("m.csv", hours(1));
  options.patience = milliseconds(20);
  ASSERT_TRUE(writer_.Start(options).ok());
  std::filesystem::remove(options.path);
  ASSERT_EQ(mkfifo(options.path.c_str(), 0600), 0);
  writer_.Stop();
  ASSERT_EQ(errors_.size(), 1U);
  EXPECT_EQ(errors_[0].message(), "the metrics \"" + options.path +
                                      "\" is left as it is: a write to it has not ended for 20 ms");
  const int reader = open(options.path.c_str(), O_RDONLY);  // the thread goes on, and ends
  char none = 0;
  EXPECT_EQ(read(reader, &none, 1), 0);  // a line cannot be added to a pipe
  close(reader);
  EXPECT_EQ(errors_.size(), 1U);
}

// Whether a link that leads to itself is a folder cannot even be asked.
TEST_F(MetricsWriterTest, NoExceptionLeavesTheThread) {
  namespace fs = std::filesystem;
  const auto link_to = [this](const std::string& target) {
    fs::create_symlink(target, folder_ + "/new");
    fs::rename(folder_ + "/new", folder_ + "/link");
  };
  fs::create_directory(folder_ + "/folder");
  link_to("folder");
  std::latch failed(1);
  MetricsFileOptions options = Options("link/m.prom", milliseconds(1));
  options.on_error = [&](const Status&) {
    failed.count_down();
    throw std::runtime_error("no memory to tell it");
  };
  ASSERT_TRUE(writer_.Start(options).ok());
  link_to("link");
  failed.wait();
  fs::remove(folder_ + "/folder/m.prom");
  link_to("folder");
  EXPECT_TRUE(tests::Within(seconds(30), [&] { return !Lines("link/m.prom").empty(); }));
  writer_.Stop();
}

TEST_F(MetricsWriterTest, LinesTellOfTheTimeSinceTheOneBefore) {
  observer_->metrics.AddGroup(OpKind::kAllReduce, 4, 100);
  ASSERT_TRUE(writer_.Start(Options("m.csv", milliseconds(20))).ok());
  const auto has = [&](const std::string& end) {
    const std::vector<std::string> lines = Lines("m.csv");
    return std::any_of(lines.begin(), lines.end(),
                       [&](const std::string& line) { return line.ends_with(end); });
  };
  EXPECT_TRUE(tests::Within(seconds(30), [&] { return has(",0.75"); }));
  observer_->metrics.AddGroup(OpKind::kAllReduce, 1, 100);
  EXPECT_TRUE(tests::Within(seconds(30), [&] { return has(",0"); }));
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
