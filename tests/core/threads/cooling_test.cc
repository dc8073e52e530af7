#include "core/threads/cooling.h"

#include <gtest/gtest.h>

#include <chrono>

namespace sirtaki::core {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Cooling::Limits kLimits{microseconds(20), milliseconds(1), milliseconds(5)};

TEST(CoolingTest, IsHotForTheHotTimeAfterTraffic) {
  TimePoint now{seconds(5)};
  Cooling cooling(kLimits, now);
  EXPECT_TRUE(cooling.Hot(now + microseconds(49), microseconds(50)));
  EXPECT_FALSE(cooling.Hot(now + microseconds(50), microseconds(50)));
  cooling.Traffic(now + seconds(1));
  EXPECT_TRUE(cooling.Hot(now + seconds(1), microseconds(50)));
}

TEST(CoolingTest, SleepsATwentiethOfTheQuietTimeWithinItsLimits) {
  const TimePoint start{seconds(5)};
  const Cooling cooling(kLimits, start);
  const auto sleep = [&](Duration quiet, bool outstanding) {
    return cooling.NextPoll(start + quiet, outstanding) - (start + quiet);
  };
  EXPECT_EQ(sleep(microseconds(50), true), microseconds(20));
  EXPECT_EQ(sleep(milliseconds(2), true), microseconds(100));
  EXPECT_EQ(sleep(milliseconds(20), true), milliseconds(1));
  EXPECT_EQ(sleep(seconds(20), true), milliseconds(1));
  EXPECT_EQ(sleep(milliseconds(40), false), milliseconds(2));
  EXPECT_EQ(sleep(seconds(20), false), milliseconds(5));
}

}  // namespace
}  // namespace sirtaki::core
