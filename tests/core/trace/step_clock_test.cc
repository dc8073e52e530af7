#include "core/trace/step_clock.h"

#include <gtest/gtest.h>

#include <vector>

namespace sirtaki::core::trace {
namespace {

class StepClockTest : public testing::Test {
 protected:
  Metrics Read() const { return observer_->metrics.Read(); }
  std::vector<Event> Events() const {
    std::vector<Event> events;
    std::uint64_t lost = 0;
    observer_->recorder.Read(0, true, &events, &lost);
    return events;
  }
  // Until the clock has moved on.
  static TimePoint Later() {
    const TimePoint before = Clock::now();
    while (Clock::now() <= before) {
    }
    return Clock::now();
  }

  ObserverPtr observer_ = std::make_shared<Observer>();
  StepClock clock_{observer_};
};

TEST_F(StepClockTest, AStepIsFromItsFirstGradientToItsEnd) {
  const TimePoint before = Later();
  clock_.NoteGradient();
  const TimePoint first = Later();
  clock_.NoteGradient();
  Later();
  clock_.BeginStep();
  const TimePoint begun = Later();
  clock_.EndStep();
  const std::vector<Event> events = Events();
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].kind, EventKind::kStep);
  EXPECT_EQ(events[0].number, 1U);
  EXPECT_GE(events[0].begin, before);
  EXPECT_LE(events[0].begin, first);
  EXPECT_GE(events[0].end, begun);
  EXPECT_EQ(Read().Count(Metric::kSteps), 1);
  EXPECT_GT(Read().Time(Metric::kBackwardTime), Duration::zero());
  EXPECT_LE(Read().Time(Metric::kBackwardTime), begun - before);
  EXPECT_EQ(Read().Time(Metric::kStepTime), Duration::zero());  // none has ended before
}

TEST_F(StepClockTest, TheTimeOfStepsIsFromEndToEnd) {
  for (int step = 0; step < 3; ++step) {
    clock_.NoteGradient();
    clock_.BeginStep();
    clock_.EndStep();
    Later();
  }
  const std::vector<Event> events = Events();
  ASSERT_EQ(events.size(), 3U);
  EXPECT_EQ(Read().Time(Metric::kStepTime), events[2].end - events[0].end);
  EXPECT_EQ(Read().Count(Metric::kTimedSteps), 2);
  EXPECT_EQ(events[2].number, 3U);
}

TEST_F(StepClockTest, WhatIsBeforeTheFirstStepAndAfterTheLastIsNotOfSteps) {
  const auto wait = [this] {
    observer_->metrics.communication().BeginWait(Later());
    observer_->metrics.communication().EndWait(Later());
  };
  wait();
  clock_.EndStep();
  const Duration before = Read().Time(Metric::kWaitTime);
  EXPECT_GT(before, Duration::zero());
  EXPECT_EQ(Read().Time(Metric::kStepWaitTime), Duration::zero());
  wait();
  clock_.EndStep();
  wait();
  clock_.EndStep();
  const Duration within = Read().Time(Metric::kWaitTime) - before;
  EXPECT_EQ(Read().Time(Metric::kStepWaitTime), within);
  EXPECT_LT(within, Read().Time(Metric::kStepTime));
  wait();
  EXPECT_EQ(Read().Time(Metric::kStepWaitTime), within);
}

TEST_F(StepClockTest, TheLastStepIsTheDifferenceThatItMade) {
  const auto step = [this](int bytes) {
    clock_.NoteGradient();
    Later();
    clock_.BeginStep();
    observer_->metrics.AddGroup(OpKind::kAllReduce, 2, bytes);
    observer_->metrics.communication().BeginTransfer(Later());
    observer_->metrics.communication().EndTransfer(Later());
    clock_.EndStep();
  };
  step(1);
  EXPECT_EQ(clock_.LastStep().Count(Metric::kSteps), 0);
  step(10);
  step(100);
  observer_->metrics.AddGroup(OpKind::kAllReduce, 1, 1000);  // of the next
  const Metrics last = clock_.LastStep();
  const std::vector<Event> events = Events();
  EXPECT_EQ(last.Count(Metric::kSteps), 1);
  EXPECT_EQ(last.Count(Metric::kTimedSteps), 1);
  EXPECT_EQ(last.Count(Metric::kBytes), 100);
  EXPECT_EQ(last.Count(Metric::kTensors), 2);
  EXPECT_EQ(last.Time(Metric::kStepTime), events[2].end - events[1].end);
  EXPECT_GT(last.Time(Metric::kBackwardTime), Duration::zero());
  EXPECT_LT(last.Time(Metric::kBackwardTime), last.Time(Metric::kStepTime));
  EXPECT_EQ(last.Time(Metric::kTransferTime), last.Time(Metric::kStepTransferTime));
  EXPECT_EQ(Overlap(last), 1.0);
}

TEST_F(StepClockTest, AStepWithoutGradientsIsAnInstant) {
  clock_.BeginStep();
  clock_.EndStep();
  EXPECT_EQ(Events()[0].begin, Events()[0].end);
  EXPECT_EQ(Read().Time(Metric::kBackwardTime), Duration::zero());
}

}  // namespace
}  // namespace sirtaki::core::trace
