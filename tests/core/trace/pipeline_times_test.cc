#include "core/trace/pipeline_times.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "core/trace/doing.h"
#include "core/trace/summary.h"

namespace sirtaki::core::trace {
namespace {

using std::chrono::milliseconds;

std::vector<PipelineTimes> OneBatch(const std::string& name, int ms, int busy, double bubble) {
  PipelineTotals totals;
  totals.Add(name, milliseconds(ms), milliseconds(busy), bubble);
  return totals.Read();
}

TEST(PipelineTimesTest, BatchesOfANameAddUp) {
  PipelineTotals totals;
  totals.Add("a", milliseconds(10), milliseconds(6), 0.5);
  totals.Add("b", milliseconds(1), milliseconds(1), 0);
  totals.Add("a", milliseconds(30), milliseconds(24), 0.1);
  const std::vector<PipelineTimes> times = totals.Read();
  ASSERT_EQ(times.size(), 2U);
  EXPECT_EQ(times[0].name(), "a");
  EXPECT_EQ(times[0].batches, 2);
  EXPECT_EQ(times[0].nanoseconds, 40'000'000);
  EXPECT_EQ(times[0].busy_nanoseconds, 30'000'000);
  EXPECT_DOUBLE_EQ(times[0].scheduled_nanoseconds, 8e6);  // a fifth of the time
}

TEST(PipelineTimesTest, ALongNameIsCut) {
  const std::string name(100, 'x');
  EXPECT_EQ(OneBatch(name, 1, 1, 0)[0].name(), name.substr(0, PipelineTimes::kNameBytes));
}

TEST(PipelineTimesTest, TheTextHasWhatRanksWaitBesideWhatTheScheduleSays) {
  // Rank 2 is done after 80 ms, and is idle until the others are.
  EXPECT_EQ(PipelinesText({OneBatch("p", 100, 90, 0.125), {}, OneBatch("p", 80, 70, 0.125)}),
            "The pipeline \"p\", 1 batch: its ranks wait 20.0 % of the time, and 12.5 % by its "
            "schedule with passes of equal times; rank 2 waits 30.0 %, rank 0 10.0 %.\n");
}

TEST(PipelineTimesTest, TheTableHasALineForEachPipeline) {
  const std::string text = SummaryText({Metrics()}, {OneBatch("alone", 100, 100, 0)});
  EXPECT_NE(text.find("\nThe pipeline \"alone\", 1 batch: its ranks wait 0.0 % of the time, and "
                      "0.0 % by its schedule with passes of equal times.\n"),
            std::string::npos)
      << text;
}

TEST(DoingTest, TellsWhatThreadsAreInTheMiddleOf) {
  Doing doing;
  EXPECT_EQ(doing.Text({}), "");
  {
    const Doing::Scope one(doing, [](TimePoint now) {
      return "here since " + std::to_string(now.time_since_epoch() / milliseconds(1));
    });
    const Doing::Scope none(doing, [](TimePoint) { return std::string(); });
    const Doing::Scope other(doing, [](TimePoint) { return std::string("there"); });
    EXPECT_EQ(doing.Text(TimePoint(milliseconds(7))), "here since 7; there");
  }
  EXPECT_EQ(doing.Text({}), "");
}

}  // namespace
}  // namespace sirtaki::core::trace
