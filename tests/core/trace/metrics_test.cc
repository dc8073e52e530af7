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
  const std::string line = MetricsCsvLine({counters.Read(), {}, 2}, 1700000000.25);
  EXPECT_EQ(std::count(head.begin(), head.end(), ','), std::count(line.begin(), line.end(), ','));
  EXPECT_TRUE(head.starts_with("unix_seconds,rank,steps,step_seconds,")) << head;
  EXPECT_TRUE(line.starts_with("1700000000.250,2,3,1.5,")) << line;
}

TEST(MetricsTest, PrometheusHasAHeadForEachFamilyAndEscapesLabels) {
  MetricCounters counters;
  counters.AddGroup(OpKind::kBroadcast, 2, 4096);
  const std::string text = MetricsPrometheus({counters.Read(), counters.Read(), 1}, "a\"b\\c");
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

TEST(MetricsTest, FilesHaveHowItWentSinceTheyWereWrittenLast) {
  MetricCounters counters;
  const auto step = [&counters](int tensors, Duration exposed) {
    counters.Add(Metric::kSteps);
    counters.Add(Metric::kTimedSteps);
    counters.Add(Metric::kStepTime, milliseconds(500));
    counters.Add(Metric::kStepWaitTime, milliseconds(50));
    counters.Add(Metric::kStepTransferTime, milliseconds(400));
    counters.Add(Metric::kStepExposedTime, exposed);
    counters.AddGroup(OpKind::kAllReduce, tensors, 4096);
  };
  step(1, milliseconds(300));
  const Metrics before = counters.Read();
  step(3, milliseconds(100));
  step(5, milliseconds(100));
  const MetricsReport report{counters.Read(), counters.Read() - before, 0};
  const std::string line = MetricsCsvLine(report, 0);
  EXPECT_TRUE(line.ends_with(",0.5,0.05,0.4,4096,0.75,0.75")) << line;
  EXPECT_TRUE(MetricsCsvHead().ends_with(
      ",recent_step_seconds,recent_step_wait_seconds,recent_step_transfer_seconds,"
      "recent_step_bytes,recent_overlap,recent_fusion_efficiency"))
      << MetricsCsvHead();
  const std::string text = MetricsPrometheus(report, "a");
  EXPECT_THAT(text, HasSubstr("# TYPE sirtaki_recent_overlap gauge\n"
                              "sirtaki_recent_overlap{rank=\"0\",host=\"a\"} 0.75\n"));
  // Nothing has happened since: there is nothing to tell.
  const MetricsReport idle{counters.Read(), {}, 0};
  EXPECT_TRUE(MetricsCsvLine(idle, 0).ends_with(",,,,,,"));
  EXPECT_EQ(MetricsPrometheus(idle, "a").find("recent"), std::string::npos);
}

TEST(MetricsTest, ABarrierMovesNothing) {
  MetricCounters counters;
  counters.AddGroup(OpKind::kBarrier, 1, 0);
  const Metrics metrics = counters.Read();
  EXPECT_EQ(metrics.Count(Metric::kGroups), 0);
  EXPECT_EQ(metrics.Count(Metric::kTensors), 0);
  EXPECT_EQ(metrics.kind_groups[static_cast<std::size_t>(OpKind::kBarrier)], 1);
  EXPECT_FALSE(FusionEfficiency(metrics).has_value());
}

TEST(MetricsTest, OverlapIsOfTheTimeOfStepsAndOfAllWhereThereAreNone) {
  MetricCounters counters;
  EXPECT_FALSE(Overlap(counters.Read()).has_value());
  counters.Add(Metric::kTransferTime, milliseconds(100));
  counters.Add(Metric::kExposedTime, milliseconds(75));
  EXPECT_EQ(Overlap(counters.Read()), 0.25);
  counters.Add(Metric::kTimedSteps);
  counters.Add(Metric::kStepTransferTime, milliseconds(50));
  counters.Add(Metric::kStepExposedTime, milliseconds(25));
  EXPECT_EQ(Overlap(counters.Read()), 0.5);
  counters.Add(Metric::kDeviceGroups);  // whose time nobody on the host has waited for
  EXPECT_FALSE(Overlap(counters.Read()).has_value());
}

TEST(MetricsTest, ATimeThatRunsBackwardsCountsAsNone) {
  MetricCounters counters;
  counters.Add(Metric::kMoveTime, milliseconds(-5));
  EXPECT_EQ(counters.Read().Count(Metric::kMoveTime), 0);
}

// 101 steps of 10 ms, 10 buckets of 1 MB in each, of which most of the communication is hidden.
Metrics Usual() {
  MetricCounters counters;
  counters.Add(Metric::kSteps, 101);
  counters.Add(Metric::kTimedSteps, 100);
  counters.Add(Metric::kStepTime, milliseconds(1000));
  counters.Add(Metric::kCalls, 1000);
  counters.Add(Metric::kStepWaitTime, milliseconds(60));
  counters.Add(Metric::kStepTransferTime, milliseconds(500));
  counters.Add(Metric::kStepExposedTime, milliseconds(50));
  counters.Add(Metric::kStepAgreementTime, milliseconds(10));
  counters.Add(Metric::kNegotiationTime, milliseconds(100));
  counters.Add(Metric::kMoveTime, milliseconds(500));
  for (int i = 0; i < 1000; ++i) counters.AddGroup(OpKind::kAllReduce, 8, 1 << 20);
  return counters.Read();
}

Metrics With(Metrics metrics, Metric id, std::int64_t count) {
  metrics.counts[static_cast<std::size_t>(id)] = count;
  return metrics;
}
Metrics With(Metrics metrics, Metric id, milliseconds time) {
  return With(metrics, id, std::chrono::nanoseconds(time).count());
}
Metrics Waiting(milliseconds exposed, milliseconds agreement) {
  Metrics metrics = With(Usual(), Metric::kStepWaitTime, exposed + agreement);
  metrics = With(metrics, Metric::kStepExposedTime, exposed);
  return With(metrics, Metric::kStepAgreementTime, agreement);
}

TEST(AdviceTest, ThereIsNoneWhenAllIsWell) {
  EXPECT_THAT(Advice({Usual(), Usual(), Usual()}), IsEmpty());
  EXPECT_THAT(Advice({Usual()}), IsEmpty());
}

TEST(AdviceTest, ARankThatTheOthersWaitForIsNamed) {
  const Metrics waiting = Waiting(milliseconds(50), milliseconds(400));
  EXPECT_THAT(Advice({waiting, waiting, Usual(), waiting}),
              ElementsAre(HasSubstr("wait for rank 2, up to 40 %")));
  EXPECT_THAT(Advice({Usual(), waiting}), ElementsAre(HasSubstr("wait for rank 0, up to 40 %")));
}

TEST(AdviceTest, SeveralRanksMayBeLateIfTheyAreNotMost) {
  const Metrics waiting = Waiting(milliseconds(50), milliseconds(400));
  EXPECT_THAT(Advice({Usual(), waiting, Usual(), waiting}),
              ElementsAre(HasSubstr("wait for ranks 0, 2, up to 40 %")));
  EXPECT_THAT(Advice({Usual(), waiting, Usual(), Usual()}), IsEmpty());
}

// All wait for the network; rank 0 comes to each call a little later, so that it never waits for
// the others.
TEST(AdviceTest, WhoIsATadLaterIsNotToBlameForASlowNetwork) {
  const Metrics bound = With(Waiting(milliseconds(480), milliseconds(20)), Metric::kNegotiationTime,
                             milliseconds(2000));
  const Metrics later =
      With(Waiting(milliseconds(480), milliseconds(1)), Metric::kNegotiationTime, milliseconds(20));
  EXPECT_THAT(Advice({later, bound, bound}),
              ElementsAre(HasSubstr("the ranks wait for it 48 % of the time")));
}

TEST(AdviceTest, RanksThatTakeTurnsInBeingLateAreNotNamed) {
  EXPECT_THAT(Advice({Waiting(milliseconds(50), milliseconds(300)),
                      Waiting(milliseconds(50), milliseconds(200)),
                      Waiting(milliseconds(50), milliseconds(250))}),
              IsEmpty());
}

TEST(AdviceTest, ALittleMoreOrLessWaitingIsNoSign) {
  EXPECT_THAT(Advice({Waiting(milliseconds(50), milliseconds(40)),
                      Waiting(milliseconds(50), milliseconds(130))}),
              IsEmpty());
  EXPECT_THAT(Advice({Waiting(milliseconds(50), milliseconds(250)),
                      Waiting(milliseconds(50), milliseconds(400))}),
              IsEmpty());
}

TEST(AdviceTest, LessDataDoesNotHelpRanksThatWaitForEachOther) {
  const Metrics serial = With(Waiting(milliseconds(200), milliseconds(400)),
                              Metric::kStepTransferTime, milliseconds(200));
  EXPECT_THAT(Advice({serial, serial}), IsEmpty());
}

TEST(AdviceTest, CommunicationThatNothingOverlapsIsTold) {
  const Metrics serial = Waiting(milliseconds(490), milliseconds(10));
  EXPECT_THAT(Advice({serial, serial}),
              ElementsAre(HasSubstr("the ranks wait for it 49 % of the time")));
}

// Waiting is not communication, and neither is what takes no time.
TEST(AdviceTest, OverlapIsNotMissedWhereCommunicationTakesLittle) {
  Metrics brief = With(Waiting(milliseconds(20), milliseconds(250)), Metric::kStepTransferTime,
                       milliseconds(20));
  EXPECT_THAT(Advice({brief, brief}), IsEmpty());
}

TEST(AdviceTest, OfGpusNothingIsSaidAboutOverlap) {
  const Metrics serial =
      With(Waiting(milliseconds(490), milliseconds(10)), Metric::kDeviceGroups, std::int64_t{1000});
  EXPECT_THAT(Advice({serial, serial}), IsEmpty());
}

TEST(AdviceTest, ManySmallOperationsAreToldIfTheyTakeTime) {
  MetricCounters counters;
  for (int i = 0; i < 1000; ++i) counters.AddGroup(OpKind::kAllReduce, 1, 1024);
  const Metrics small = With(counters.Read(), Metric::kSessionTime, milliseconds(1000));
  const Metrics slow = With(small, Metric::kTransferTime, milliseconds(150));
  EXPECT_THAT(Advice({slow, slow}), ElementsAre(HasSubstr("1.02 kB each, and take 15 %")));
  const Metrics fast = With(small, Metric::kTransferTime, milliseconds(10));
  EXPECT_THAT(Advice({fast, fast}), IsEmpty());
}

TEST(AdviceTest, BarriersAreNoSmallOperations) {
  MetricCounters counters;
  for (int i = 0; i < 1000; ++i) counters.AddGroup(OpKind::kBarrier, 1, 0);
  Metrics barriers = With(counters.Read(), Metric::kSessionTime, milliseconds(1000));
  barriers = With(barriers, Metric::kTransferTime, milliseconds(500));
  EXPECT_THAT(Advice({barriers, barriers}), IsEmpty());
}

// 30 of each of 4 ranks say less than 120 of one.
TEST(AdviceTest, FewOperationsOfManyRanksAreFew) {
  MetricCounters counters;
  for (int i = 0; i < 30; ++i) counters.AddGroup(OpKind::kAllReduce, 1, 1024);
  Metrics few = With(counters.Read(), Metric::kSessionTime, milliseconds(1000));
  few = With(few, Metric::kTransferTime, milliseconds(500));
  EXPECT_THAT(Advice({few, few, few, few}), IsEmpty());
}

TEST(AdviceTest, AShortRunGetsNone) {
  const Metrics brief =
      With(Waiting(milliseconds(490), milliseconds(10)), Metric::kTimedSteps, std::int64_t{3});
  EXPECT_THAT(Advice({brief, brief}), IsEmpty());
}

TEST(SummaryTest, HasALineForEachRank) {
  const Metrics messages = With(With(Usual(), Metric::kMessages, std::int64_t{500}),
                                Metric::kDeviceGroups, std::int64_t{1000});
  EXPECT_EQ(
      SummaryText({Usual(), messages, Metrics()}),
      "rank     steps   per step   waits  for others  overlap     calls  tensors/group      "
      "given   negotiate       move\n"
      "   0       101    10.0 ms     6 %         1 %     90 %      1000            8.0    "
      "1.05 GB      100 us     500 us\n"
      "   1       101    10.0 ms       -         1 %        -      1000            8.0    "
      "1.05 GB      200 us     500 us\n"
      "   2         0          -       -           -        -         0            0.0        "
      "0 B        0 us       0 us\n");
}

}  // namespace
}  // namespace sirtaki::core::trace
