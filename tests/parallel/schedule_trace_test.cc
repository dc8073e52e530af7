#include "parallel/schedule_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace sirtaki::parallel {
namespace {

using core::TimePoint;
using core::trace::Event;
using core::trace::Observer;
using core::trace::PipelineTimes;
using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TimePoint g_now{};

const Instruction kForward = {InstructionKind::kForward, 1, 2, -1, ""};
const Instruction kBackward = {InstructionKind::kBackward, 1, 2, -1, ""};
const Instruction kPost = {InstructionKind::kReceive, 1, 2, 0, ""};
const Instruction kReduce = {InstructionKind::kReduceTied, -1, -1, -1, "wte"};

class ScheduleTraceTest : public testing::Test {
 protected:
  ScheduleTraceTest() {
    g_now = TimePoint(std::chrono::hours(1));
    observer_->detail = true;
  }
  static void Pass(int ms) { g_now += milliseconds(ms); }

  void Compute(const Instruction& pass, int waits, int takes) {
    trace_.Begin(pass);
    Pass(waits);
    trace_.Arrived();
    Pass(takes);
    trace_.End();
  }
  // 1 ms of bubble for each of `takes`; a sum of 3 ms and an end of 2 ms.
  void RunBatch(bool training, bool completes, int takes) {
    ScheduleTrace::Batch batch(trace_, training);
    trace_.Begin(kPost);
    trace_.End();
    Compute(kForward, takes, 2 * takes);
    Compute(kBackward, 0, 4 * takes);
    trace_.Begin(kReduce);
    Pass(3);
    trace_.End();
    Pass(2);
    if (completes) batch.Complete();
  }

  // "bubble F1.2 0-1", in ms since the begin.
  std::vector<std::string> Told() const {
    std::vector<Event> events;
    std::uint64_t lost = 0;
    observer_->recorder.Read(0, true, &events, &lost);
    std::vector<std::string> told;
    for (const Event& event : events) {
      const auto ms = [](TimePoint at) {
        return std::to_string((at - TimePoint(std::chrono::hours(1))) / milliseconds(1));
      };
      told.push_back(std::string(EventKindName(event.kind)) + " " + std::string(event.text()) +
                     " " + ms(event.begin) + (event.end == event.begin ? "" : "-" + ms(event.end)));
    }
    return told;
  }

  const std::shared_ptr<Observer> observer_ = std::make_shared<Observer>(64);
  ScheduleTrace trace_{
      observer_, {.name = "p", .micro_batches = 4, .bubble = 0.25, .now = [] { return g_now; }}};
};

TEST_F(ScheduleTraceTest, PassesBubblesAndSumsAreToldInTheirBatch) {
  RunBatch(true, true, 1);
  EXPECT_THAT(Told(), ElementsAre("bubble F1.2 0-1", "pass F1.2 1-3", "pass B1.2 3-7",
                                  "reduce T:wte 7-10", "bubble the end 10-12", "batch p 0-12"));
}

TEST_F(ScheduleTraceTest, NothingIsToldWithoutDetail) {
  observer_->detail = false;
  RunBatch(true, true, 1);
  EXPECT_THAT(Told(), IsEmpty());
}

TEST_F(ScheduleTraceTest, TrainingBatchesAreCountedExceptTheFirst) {
  observer_->detail = false;
  RunBatch(true, true, 100);
  EXPECT_THAT(observer_->pipelines.Read(), IsEmpty());
  EXPECT_EQ(trace_.WaitedShare(), 0);
  RunBatch(false, true, 100);  // evaluates
  RunBatch(true, false, 100);  // throws
  RunBatch(true, true, 1);
  RunBatch(true, true, 5);
  const std::vector<PipelineTimes> times = observer_->pipelines.Read();
  ASSERT_EQ(times.size(), 1U);
  EXPECT_EQ(times[0].name(), "p");
  EXPECT_EQ(times[0].batches, 2);
  EXPECT_EQ(times[0].nanoseconds, (12 + 40) * 1'000'000);
  EXPECT_EQ(times[0].busy_nanoseconds, (6 + 30) * 1'000'000);
  EXPECT_DOUBLE_EQ(times[0].scheduled_nanoseconds, 0.25 * 52e6);
  EXPECT_DOUBLE_EQ(trace_.WaitedShare(), 16.0 / 52);
}

TEST_F(ScheduleTraceTest, WhoeverAsksLearnsWhatItWaitsForAndSinceWhen) {
  EXPECT_EQ(observer_->doing.Text(g_now), "");
  {
    ScheduleTrace::Batch batch(trace_, true);
    EXPECT_EQ(observer_->doing.Text(g_now), "");
    trace_.Begin(kForward);
    Pass(1);
    const std::string what =
        "stage 1 on rank 3 waits for activations of micro-batch 2 from stage 0 on rank 0";
    {
      const ScheduleTrace::Wait wait(trace_, what);
      Pass(7);
      EXPECT_EQ(observer_->doing.Text(g_now), "in the pipeline \"p\": " + what + ", for 7 ms");
    }
    trace_.Arrived();
    Pass(5);
    EXPECT_EQ(
        observer_->doing.Text(g_now),
        "in the pipeline \"p\": \"F1.2\" (the forward pass of stage 1 for micro-batch 2), for "
        "5 ms");
    EXPECT_EQ(trace_.Activity(), "\"F1.2\" (the forward pass of stage 1 for micro-batch 2)");
    trace_.End();
    EXPECT_EQ(trace_.Activity(), "");
  }
  EXPECT_EQ(observer_->doing.Text(g_now), "");
}

TEST_F(ScheduleTraceTest, AStallIsCountedAndToldInBrief) {
  trace_.Stalled("stage 1 on rank 13 waits for activations of micro-batch 2 from stage 0 on rank 0",
                 std::chrono::seconds(60));
  EXPECT_THAT(Told(),
              ElementsAre("stall stage 1 waits for activations of micro-batch 2 from stage 0 on "
                          "rank 0 0"));
  trace_.Stalled("waits for the tied parameter w from stage 0 on rank 0", std::chrono::seconds(60));
  EXPECT_THAT(Told().back(), HasSubstr("from stage 0 on rank 0"));
  EXPECT_EQ(observer_->metrics.Read().Count(core::trace::Metric::kStalls), 2);
}

}  // namespace
}  // namespace sirtaki::parallel
