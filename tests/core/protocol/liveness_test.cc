// Who is pinged and who is lost, on a clock that the test moves.
#include "core/protocol/liveness.h"

#include <gtest/gtest.h>

#include <chrono>

namespace sirtaki::core {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kPeer = 1;

class LivenessTest : public ::testing::Test {
 protected:
  LivenessTest() { liveness_.Heard(kPeer, start_); }

  Liveness::Verdict LookAt(Duration after) {
    return liveness_.Waiting(kPeer, start_, start_ + after);
  }

  const TimePoint start_{seconds(1000)};
  Liveness liveness_{seconds(2), seconds(10)};
};

TEST_F(LivenessTest, TimeInWhichThisProcessWasStoppedIsNotALostPeer) {
  EXPECT_FALSE(LookAt(milliseconds(1999)).ping);
  EXPECT_TRUE(LookAt(seconds(2)).ping);
  EXPECT_FALSE(LookAt(hours(1)).lost);
  // Several sets wait for the same peer: each looks in the same round.
  EXPECT_FALSE(LookAt(hours(1)).lost);
  EXPECT_LT(liveness_.Silent(kPeer), seconds(10));
  liveness_.Heard(kPeer, start_ + hours(1));
  EXPECT_EQ(liveness_.Silent(kPeer), Duration::zero());
}

TEST_F(LivenessTest, AStopAtTheEndOfTheTimeOutLeavesTimeForTheAnswer) {
  EXPECT_TRUE(LookAt(seconds(2)).ping);
  TimePoint now = start_ + seconds(2);
  for (int i = 0; i < 79; ++i) {
    EXPECT_FALSE(liveness_.Waiting(kPeer, start_, now += milliseconds(100)).lost);
  }
  EXPECT_FALSE(liveness_.Waiting(kPeer, start_, now += hours(1)).lost);
}

TEST_F(LivenessTest, APeerThatDoesNotAnswerIsLostSoonAfterTheTimeOut) {
  Duration at = seconds(2);
  Liveness::Verdict verdict = LookAt(at);
  EXPECT_TRUE(verdict.ping);
  for (int looks = 0; !verdict.lost; ++looks) {
    ASSERT_LT(looks, 1000);
    ASSERT_GT(verdict.next, start_ + at);
    at = verdict.next - start_;
    verdict = LookAt(at);
    EXPECT_FALSE(verdict.ping);
  }
  EXPECT_GE(at, seconds(10));
  EXPECT_LE(at, milliseconds(10'200));
  EXPECT_GE(liveness_.Silent(kPeer), seconds(10));
}

// The answer has half the time at least.
TEST(LivenessOfALongPingIntervalTest, APeerHasTimeToAnswerWhateverThePingInterval) {
  const TimePoint start{seconds(1000)};
  Liveness liveness(seconds(20), seconds(10));
  liveness.Heard(kPeer, start);
  EXPECT_TRUE(liveness.Waiting(kPeer, start, start + seconds(20)).ping);
  for (Duration at = seconds(20); at <= seconds(25); at += milliseconds(100)) {
    EXPECT_FALSE(liveness.Waiting(kPeer, start, start + at).lost);
  }
}

// On a host that is that busy, stops do not keep a lost peer alive.
TEST_F(LivenessTest, APeerIsLostThoughThisProcessIsStoppedAgainAndAgain) {
  Duration at = seconds(2);
  EXPECT_TRUE(LookAt(at).ping);
  int looks = 0;
  while (!LookAt(at += seconds(30)).lost) ASSERT_LT(++looks, 20);
}

}  // namespace
}  // namespace sirtaki::core
