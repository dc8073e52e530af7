#include "fusion/gradient_slots.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

namespace sirtaki::fusion {
namespace {

TEST(GradientSlotsTest, StartsWithNothingReported) {
  const GradientSlots slots(3);
  EXPECT_EQ(slots.size(), 3u);
  EXPECT_EQ(slots.outstanding(), 3u);
  EXPECT_EQ(slots.Unreported(), (std::vector<std::size_t>{0, 1, 2}));
  EXPECT_FALSE(slots.reported(1));
}

TEST(GradientSlotsTest, AReportCountsOnceUntilReset) {
  GradientSlots slots(3);
  EXPECT_TRUE(slots.Report(1));
  EXPECT_FALSE(slots.Report(1));
  EXPECT_TRUE(slots.reported(1));
  EXPECT_EQ(slots.outstanding(), 2u);
  EXPECT_EQ(slots.Unreported(), (std::vector<std::size_t>{0, 2}));
  slots.Reset();
  EXPECT_EQ(slots.outstanding(), 3u);
  EXPECT_TRUE(slots.Report(1));
}

TEST(GradientSlotsTest, NoSlotsIsFine) {
  GradientSlots slots(0);
  EXPECT_EQ(slots.outstanding(), 0u);
  EXPECT_TRUE(slots.Unreported().empty());
  slots.Reset();
}

// Several hooks report the same slots at once: each slot is won by one of them.
TEST(GradientSlotsTest, ThreadsShareTheSlots) {
  constexpr std::size_t kSlots = 200;
  constexpr int kThreads = 4;
  constexpr int kSteps = 50;
  GradientSlots slots(kSlots);
  std::atomic<int> wins{0};
  std::barrier step(kThreads + 1);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int s = 0; s < kSteps; ++s) {
        step.arrive_and_wait();
        for (std::size_t i = 0; i < kSlots; ++i) {
          const std::size_t slot = (i * 7 + static_cast<std::size_t>(t) * 31) % kSlots;
          if (slots.Report(slot)) wins.fetch_add(1, std::memory_order_relaxed);
        }
        step.arrive_and_wait();
      }
    });
  }
  for (int s = 0; s < kSteps; ++s) {
    step.arrive_and_wait();
    while (slots.outstanding() > 0) std::this_thread::yield();
    step.arrive_and_wait();
    EXPECT_TRUE(slots.Unreported().empty());
    EXPECT_EQ(wins.exchange(0), static_cast<int>(kSlots));
    slots.Reset();
    EXPECT_EQ(slots.outstanding(), kSlots);
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(GradientSlotsTest, ReportPublishesWhatWasWrittenBefore) {
  for (int repeat = 0; repeat < 200; ++repeat) {
    GradientSlots slots(2);
    int gradients[2] = {};
    std::thread first([&] {
      gradients[0] = 1;
      slots.Report(0);
    });
    std::thread second([&] {
      gradients[1] = 2;
      slots.Report(1);
    });
    while (slots.outstanding() > 0) std::this_thread::yield();
    EXPECT_EQ(gradients[0] + gradients[1], 3);
    first.join();
    second.join();
  }
}

}  // namespace
}  // namespace sirtaki::fusion
