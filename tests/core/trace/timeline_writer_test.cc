#include "core/trace/timeline_writer.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <latch>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

// While there is one, the next write of a timeline waits there, as on a disk that does not answer.
struct Hang {
  std::latch began{1};
  std::latch ends{1};
  std::latch over{1};
};
std::atomic<Hang*> hang{nullptr};

}  // namespace

// In the place of the C library's.
extern "C" ssize_t pwrite(int file, const void* from, std::size_t bytes, off_t at) {
  Hang* const mine = hang.exchange(nullptr);
  if (mine != nullptr) {
    mine->began.count_down();
    mine->ends.wait();
  }
  const ssize_t written = syscall(SYS_pwrite64, file, from, bytes, at);
  if (mine != nullptr) mine->over.count_down();
  return written;
}

namespace sirtaki::core::trace {
namespace {

using nlohmann::json;
using std::chrono::hours;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

class TimelineWriterTest : public testing::Test {
 protected:
  TimelineWriterTest() {
    std::string folder = testing::TempDir() + "timeline_writer.XXXXXX";
    folder_ = mkdtemp(folder.data());
  }
  ~TimelineWriterTest() override {
    writer_.Stop();  // which would write into the folder as it goes
    std::filesystem::remove_all(folder_);
  }

  TimelineOptions Options(Duration interval) {
    return {.path = (folder_ / "rank-0.json").string(),
            .identity = {},
            .max_bytes = 0,
            .interval = interval,
            .on_error = [this](const Status& why) {
              error_ = why;
              ++errors_;
            }};
  }
  void Mark(int number) {
    Event event;
    event.kind = EventKind::kMark;
    event.begin = event.end = Clock::now();
    event.number = static_cast<std::uint64_t>(number);
    event.SetText("mark");
    observer_->recorder.Add(event);
  }
  // The lines of that kind.
  std::vector<json> Lines(EventKind kind) const {
    std::ifstream file(folder_ / "rank-0.json");
    std::stringstream text;
    text << file.rdbuf();
    std::vector<json> lines;
    for (json& line : json::parse(text.str())) {
      if (line.contains("cat") && line["cat"] == EventKindName(kind)) {
        lines.push_back(std::move(line));
      }
    }
    return lines;
  }
  template <typename Condition>
  static bool Eventually(const Condition& condition) {
    const TimePoint limit = Clock::now() + seconds(30);
    while (!condition()) {
      if (Clock::now() > limit) return false;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return true;
  }

  std::filesystem::path folder_;
  ObserverPtr observer_ = std::make_shared<Observer>(64);
  std::atomic<int> errors_{0};
  Status error_;  // before errors_ is counted
  TimelineWriter writer_{observer_};
};

TEST_F(TimelineWriterTest, WhatIsFlushedIsInTheFile) {
  ASSERT_TRUE(writer_.Start(Options(hours(1))).ok());
  Mark(1);
  writer_.Flush(seconds(30));
  EXPECT_EQ(Lines(EventKind::kMark).size(), 1U);
  Mark(2);
  writer_.Flush(seconds(30));
  EXPECT_EQ(Lines(EventKind::kMark).size(), 2U);
  writer_.Stop();
  writer_.Flush(hours(1));  // of what is not written nothing is waited for
}

TEST_F(TimelineWriterTest, WritesWhatHappensBetweenStartAndStop) {
  Mark(1);
  ASSERT_TRUE(writer_.Start(Options(hours(1))).ok());
  EXPECT_TRUE(observer_->detail);
  Mark(2);
  Mark(3);
  writer_.Stop();
  EXPECT_FALSE(observer_->detail);
  Mark(4);
  const std::vector<json> marks = Lines(EventKind::kMark);
  ASSERT_EQ(marks.size(), 2U);
  EXPECT_EQ(marks[0]["args"]["number"], 2);
  EXPECT_EQ(marks[1]["args"]["number"], 3);
  EXPECT_EQ(errors_, 0);
}

TEST_F(TimelineWriterTest, TheEndLeavesBehindAWriteThatHangs) {
  TimelineOptions options = Options(hours(1));
  options.patience = milliseconds(20);
  ASSERT_TRUE(writer_.Start(options).ok());
  Mark(1);
  Hang disk;
  hang = &disk;
  writer_.Stop();
  ASSERT_EQ(errors_, 1);
  EXPECT_EQ(error_.message(), "the timeline \"" + options.path +
                                  "\" is left as it is: a write to it has not ended for 20 ms");
  disk.began.wait();
  // The next one has nothing to do with it, whenever the thread goes on.
  TimelineOptions next = options;
  next.path = (folder_ / "next.json").string();
  next.patience = hours(1);
  ASSERT_TRUE(writer_.Start(next).ok());
  disk.ends.count_down();
  disk.over.wait();
  EXPECT_TRUE(observer_->detail);
  writer_.Stop();
  EXPECT_EQ(errors_, 1);
  EXPECT_EQ(Lines(EventKind::kMark).size(), 1U);
}

TEST_F(TimelineWriterTest, FollowsWhileTheRankRuns) {
  ASSERT_TRUE(writer_.Start(Options(milliseconds(1))).ok());
  for (int i = 1; i <= 3; ++i) {
    Mark(i);
    EXPECT_TRUE(Eventually([&] {
      try {
        return Lines(EventKind::kMark).size() == std::size_t(i);
      } catch (const json::parse_error&) {
        return false;  // read in two pieces, and a write came between
      }
    }));
  }
}

TEST_F(TimelineWriterTest, StartsAgainAfterAStopButNotTwice) {
  ASSERT_TRUE(writer_.Start(Options(hours(1))).ok());
  const Status twice = writer_.Start(Options(hours(1)));
  EXPECT_EQ(twice.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(twice.message().find("rank-0.json"), std::string::npos) << twice.message();
  Mark(1);
  writer_.Stop();
  writer_.Stop();
  ASSERT_TRUE(writer_.Start(Options(hours(1))).ok());
  Mark(2);
  writer_.Stop();
  const std::vector<json> marks = Lines(EventKind::kMark);
  ASSERT_EQ(marks.size(), 1U);
  EXPECT_EQ(marks[0]["args"]["number"], 2);
}

TEST_F(TimelineWriterTest, CountsWhatWasOverwritten) {
  ASSERT_TRUE(writer_.Start(Options(hours(1))).ok());
  for (int i = 0; i < 100; ++i) Mark(i);
  writer_.Stop();
  EXPECT_EQ(Lines(EventKind::kMark).size(), 64U);
  const std::vector<json> lost = Lines(EventKind::kLost);
  ASSERT_EQ(lost.size(), 1U);
  EXPECT_EQ(lost[0]["args"]["count"], 36);
}

TEST_F(TimelineWriterTest, AFileThatCannotBeMadeIsAnErrorOfStart) {
  TimelineOptions options = Options(hours(1));
  std::ofstream(folder_ / "file") << "x";
  options.path = (folder_ / "file" / "rank-0.json").string();
  EXPECT_EQ(writer_.Start(options).code(), StatusCode::kBackend);
  EXPECT_FALSE(observer_->detail);
  EXPECT_EQ(errors_, 0);
}

// A limit on the length of files stands in for a disk that is full.
TEST_F(TimelineWriterTest, AFileThatCannotBeWrittenIsToldOnce) {
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_TRUE(writer_.Start(Options(milliseconds(1))).ok());
  rlimit small = before;
  small.rlim_cur = std::filesystem::file_size(folder_ / "rank-0.json") + 10;
  setrlimit(RLIMIT_FSIZE, &small);
  Mark(1);
  EXPECT_TRUE(Eventually([&] { return errors_ == 1; }));
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_NE(error_.message().find("rank-0.json"), std::string::npos) << error_.message();
  EXPECT_FALSE(observer_->detail);
  std::signal(SIGXFSZ, handler);
  Mark(2);
  EXPECT_TRUE(Lines(EventKind::kMark).empty());
  ASSERT_TRUE(writer_.Start(Options(hours(1))).ok());
  Mark(3);
  writer_.Stop();
  EXPECT_EQ(Lines(EventKind::kMark).size(), 1U);
  EXPECT_EQ(errors_, 1);
}

TEST_F(TimelineWriterTest, FourThreadsThatTellAreFollowedWithoutLoss) {
  observer_ = std::make_shared<Observer>(std::size_t{1} << 14);
  TimelineWriter writer(observer_);
  ASSERT_TRUE(writer.Start(Options(milliseconds(1))).ok());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; ++i) Mark(t * 2000 + i + 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  writer.Stop();
  std::vector<int> numbers;
  for (const json& line : Lines(EventKind::kMark)) numbers.push_back(line["args"]["number"]);
  std::sort(numbers.begin(), numbers.end());
  ASSERT_EQ(numbers.size(), 8000U);
  for (int i = 0; i < 8000; ++i) EXPECT_EQ(numbers[static_cast<std::size_t>(i)], i + 1);
}

}  // namespace
}  // namespace sirtaki::core::trace
