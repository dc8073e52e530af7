#include "core/trace/communication_clock.h"

#include <gtest/gtest.h>

#include <chrono>

namespace sirtaki::core::trace {
namespace {

using std::chrono::milliseconds;

class CommunicationClockTest : public testing::Test {
 protected:
  static TimePoint At(int ms) { return TimePoint(std::chrono::hours(1)) + milliseconds(ms); }
  void Expect(int at, int transfer, int wait, int exposed, int agreement) const {
    const CommunicationClock::Times times = clock_.Read(At(at));
    EXPECT_EQ(times.transfer, milliseconds(transfer));
    EXPECT_EQ(times.wait, milliseconds(wait));
    EXPECT_EQ(times.exposed, milliseconds(exposed));
    EXPECT_EQ(times.agreement, milliseconds(agreement));
  }

  CommunicationClock clock_;
};

TEST_F(CommunicationClockTest, WhatOverlapsCountsOnce) {
  clock_.BeginTransfer(At(0));
  clock_.BeginTransfer(At(10));
  clock_.BeginWait(At(15));
  clock_.BeginWait(At(18));
  clock_.EndTransfer(At(20));
  clock_.EndWait(At(25));
  clock_.EndTransfer(At(30));
  clock_.EndWait(At(40));
  Expect(1000, 30, 25, 15, 0);
}

TEST_F(CommunicationClockTest, WaitingForRanksIsWhatNothingElseExplains) {
  clock_.BeginCalls(2, At(0));
  clock_.BeginWait(At(10));
  clock_.EndCalls(1, At(20));
  clock_.BeginTransfer(At(20));  // of the first, while the second is not agreed on
  clock_.EndTransfer(At(35));
  clock_.EndCalls(1, At(40));
  clock_.EndWait(At(50));
  Expect(1000, 15, 40, 15, 15);
}

TEST_F(CommunicationClockTest, WhatIsNotOverCounts) {
  clock_.BeginTransfer(At(0));
  clock_.BeginWait(At(5));
  Expect(7, 7, 2, 2, 0);
  Expect(9, 9, 4, 4, 0);
}

TEST_F(CommunicationClockTest, TimesMayComeLate) {
  clock_.BeginTransfer(At(10));
  clock_.BeginWait(At(4));
  clock_.EndWait(At(8));
  clock_.EndTransfer(At(20));
  Expect(15, 10, 0, 0, 0);
}

}  // namespace
}  // namespace sirtaki::core::trace
