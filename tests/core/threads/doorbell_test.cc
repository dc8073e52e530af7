#include "core/threads/doorbell.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "core/threads/parking.h"

namespace sirtaki::core {
namespace {

TimePoint Soon() { return Clock::now() + std::chrono::seconds(30); }

TEST(DoorbellTest, ARingAfterTheTicketEndsTheSleepAtOnce) {
  Doorbell bell;
  const std::uint64_t ticket = bell.Arm();
  bell.Ring();
  EXPECT_TRUE(bell.WaitUntil(ticket, TimePoint::max()));
}

TEST(DoorbellTest, ARingBeforeTheTicketDoesNot) {
  Doorbell bell;
  bell.Ring();
  const std::uint64_t ticket = bell.Arm();
  EXPECT_FALSE(bell.WaitUntil(ticket, Clock::now() + std::chrono::milliseconds(1)));
}

TEST(DoorbellTest, APastDeadlineReturns) {
  Doorbell bell;
  EXPECT_FALSE(bell.WaitUntil(bell.Arm(), TimePoint::min()));
  EXPECT_FALSE(bell.HasSleepers());
}

// Two threads that ring each other in turn: a lost ring would stop them.
TEST(DoorbellTest, NoRingIsLost) {
  constexpr int kTurns = 2000;
  Doorbell bell;
  std::atomic<int> turn{0};
  std::atomic<int> lost{0};
  const auto play = [&](int parity) {
    for (int i = parity; i < kTurns; i += 2) {
      while (true) {
        const std::uint64_t ticket = bell.Arm();
        if (turn == i) break;
        if (!bell.WaitUntil(ticket, Soon())) {
          ++lost;
          return;
        }
      }
      ++turn;
      bell.Ring();
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  EXPECT_EQ(lost, 0);
}

TEST(DoorbellTest, OneRingWakesAllSleepers) {
  Doorbell bell;
  const std::uint64_t ticket = bell.Arm();
  std::atomic<int> woken{0};
  std::vector<std::thread> sleepers;
  for (int i = 0; i < 3; ++i) {
    sleepers.emplace_back([&] { woken += bell.WaitUntil(ticket, Soon()) ? 1 : 0; });
  }
  while (!bell.HasSleepers()) std::this_thread::yield();
  bell.Ring();
  for (std::thread& sleeper : sleepers) sleeper.join();
  EXPECT_EQ(woken, 3);
}

TEST(ParkingTest, ACallAfterTheAnnouncementIsNotLost) {
  Parking parking;
  parking.Announce();
  parking.Unpark();
  parking.Rest(TimePoint::max());
  EXPECT_FALSE(parking.occupied());
}

TEST(ParkingTest, ACallToAnEmptyPlaceIsForgotten) {
  Parking parking;
  parking.Unpark();
  parking.Announce();
  const TimePoint limit = Clock::now() + std::chrono::milliseconds(1);
  parking.Rest(limit);
  EXPECT_GE(Clock::now(), limit);
}

TEST(ParkingTest, ARestWhoseLimitIsOverTakesTheCallAlong) {
  Parking parking;
  parking.Announce();
  parking.Unpark();
  parking.Rest(TimePoint());
  EXPECT_FALSE(parking.occupied());
  parking.Announce();
  const TimePoint limit = Clock::now() + std::chrono::milliseconds(1);
  parking.Rest(limit);
  EXPECT_GE(Clock::now(), limit);
}

}  // namespace
}  // namespace sirtaki::core
