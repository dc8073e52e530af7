#include "core/trace/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "core/trace/summary.h"

namespace sirtaki::core::trace {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(MetricsTest, TheTableIsInOrderAndNamesDiffer) {
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < kMetricCount; ++i) {
    EXPECT_EQ(MetricTable()[i].id, static_cast<Metric>(i));
    EXPECT_TRUE(names.insert(MetricTable()[i].name).second);
    EXPECT_EQ(MetricTable()[i].is_time, MetricTable()[i].name.ends_with("_seconds"));
  }
}

TEST(MetricsTest, CsvHasAValueForEachColumn) {
  MetricCounters counters;
  counters.Add(Metric::kSteps, 3);
  counters.Add(Metric::kStepTime, milliseconds(1500));
  const std::string head = MetricsCsvHead();
  const std::string line = MetricsCsvLine(counters.Read(), 2, 1700000000.25);
  EXPECT_EQ(std::count(head.begin(), head.end(), ','), std::count(line.begin(), line.end(), ','));
  EXPECT_TRUE(head.starts_with("unix_seconds,rank,steps,step_seconds,")) << head;
  EXPECT_TRUE(line.starts_with("1700000000.250,2,3,1.5,")) << line;
}

TEST(MetricsTest, PrometheusHasAHeadForEachFamilyAndEscapesLabels) {
  MetricCounters counters;
  counters.AddGroup(OpKind::kBroadcast, 2, 4096);
  const std::string text = MetricsPrometheus(counters.Read(), 1, "a\"b\\c");
  std::istringstream lines(text);
  std::set<std::string> typed;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# TYPE ")) {
      EXPECT_TRUE(typed.insert(line.substr(7, line.rfind(' ') - 7)).second) << line;
    } else if (!line.starts_with("# HELP ")) {
      EXPECT_TRUE(typed.count(line.substr(0, line.find('{'))) == 1) << line;
    }
  }
  EXPECT_THAT(text, HasSubstr("sirtaki_bytes_total{rank=\"1\",host=\"a\\\"b\\\\c\"} 4096\n"));
  EXPECT_THAT(text, HasSubstr("sirtaki_collective_bytes_total{rank=\"1\",host=\"a\\\"b\\\\c\","
                              "kind=\"broadcast\"} 4096\n"));
}

TEST(MetricsTest, ATimeThatRunsBackwardsCountsAsNone) {
  MetricCounters counters;
  counters.Add(Metric::kWaitTime, milliseconds(-5));
  EXPECT_EQ(counters.Read().Count(Metric::kWaitTime), 0);
}

// 100 steps of 10 ms, 10 buckets of 1 MB in each, of which most of the communication is hidden.
Metrics Usual() {
  MetricCounters counters;
  counters.Add(Metric::kSteps, 100);
  counters.Add(Metric::kStepTime, milliseconds(1000));
  counters.Add(Metric::kCalls, 1000);
  counters.Add(Metric::kWaitTime, milliseconds(50));
  counters.Add(Metric::kNegotiationTime, milliseconds(100));
  counters.Add(Metric::kMoveTime, milliseconds(500));
  for (int i = 0; i < 1000; ++i) counters.AddGroup(OpKind::kAllReduce, 8, 1 << 20);
  return counters.Read();
}

Metrics With(Metrics metrics, Metric id, Duration time) {
  metrics.counts[static_cast<std::size_t>(id)] = std::chrono::nanoseconds(time).count();
  return metrics;
}

TEST(AdviceTest, ThereIsNoneWhenAllIsWell) {
  EXPECT_THAT(Advice({Usual(), Usual(), Usual()}), IsEmpty());
  EXPECT_THAT(Advice({Usual()}), IsEmpty());
}

TEST(AdviceTest, ARankThatTheOthersWaitForIsNamed) {
  Metrics waiting = With(Usual(), Metric::kWaitTime, milliseconds(400));
  waiting = With(waiting, Metric::kNegotiationTime, milliseconds(4000));
  EXPECT_THAT(Advice({waiting, waiting, Usual(), waiting}),
              ElementsAre(HasSubstr("wait for rank 2, up to 40 %")));
  EXPECT_THAT(Advice({Usual(), waiting}), ElementsAre(HasSubstr("wait for rank 0, up to 40 %")));
}

TEST(AdviceTest, CommunicationThatNothingOverlapsIsTold) {
  const Metrics serial = With(Usual(), Metric::kWaitTime, milliseconds(490));
  EXPECT_THAT(Advice({serial, serial}), ElementsAre(HasSubstr("up to 49 %")));
}

TEST(AdviceTest, ManySmallOperationsAreTold) {
  MetricCounters counters;
  for (int i = 0; i < 1000; ++i) counters.AddGroup(OpKind::kAllReduce, 1, 1024);
  EXPECT_THAT(Advice({counters.Read(), counters.Read()}), ElementsAre(HasSubstr("1.02 kB each")));
}

TEST(AdviceTest, AShortRunGetsNone) {
  Metrics brief = With(Usual(), Metric::kWaitTime, milliseconds(490));
  brief.counts[static_cast<std::size_t>(Metric::kSteps)] = 3;
  EXPECT_THAT(Advice({brief, brief}), IsEmpty());
}

TEST(SummaryTest, HasALineForEachRank) {
  EXPECT_EQ(SummaryText({Usual(), Metrics()}),
            "rank    steps  step ms  waits  overlap     calls  tensors/group     given  negotiate "
            "us  move ms\n"
            "   0      100       10    5 %     90 %      1000              8   1.05 GB           "
            "100      0.5\n"
            "   1        0        0      -        -         0              0       0 B             "
            "0        0\n");
}

}  // namespace
}  // namespace sirtaki::core::trace
