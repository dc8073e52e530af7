#include "fusion/bucket_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstddef>
#include <stdexcept>
#include <thread>
#include <vector>

namespace sirtaki::fusion {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// The buckets that are launched when this one is complete.
std::vector<std::size_t> LaunchedBy(BucketLine& line, std::size_t bucket) {
  std::vector<std::size_t> launched;
  line.Complete(bucket, [&](std::size_t each) { launched.push_back(each); });
  return launched;
}

TEST(BucketLineTest, ABucketWaitsForThoseBeforeIt) {
  BucketLine line(3);
  for (int round = 0; round < 2; ++round) {
    EXPECT_THAT(LaunchedBy(line, 2), IsEmpty());
    EXPECT_THAT(LaunchedBy(line, 0), ElementsAre(0));
    EXPECT_THAT(LaunchedBy(line, 1), ElementsAre(1, 2));
  }
}

TEST(BucketLineTest, ARoundInWhichALaunchHasFailedMayBeginAnew) {
  BucketLine line(3);
  line.Leave(1);
  EXPECT_THAT(LaunchedBy(line, 2), IsEmpty());
  EXPECT_THROW(line.Complete(0, [](std::size_t) { throw std::runtime_error("refused"); }),
               std::runtime_error);
  line.Restart();
  EXPECT_THAT(LaunchedBy(line, 0), ElementsAre(0));
  EXPECT_THAT(LaunchedBy(line, 2), ElementsAre(2));
}

TEST(BucketLineTest, NobodyWaitsForABucketThatHasLeft) {
  BucketLine line(4);
  line.Leave(0);
  line.Leave(2);
  for (int round = 0; round < 2; ++round) {
    EXPECT_THAT(LaunchedBy(line, 3), IsEmpty());
    EXPECT_THAT(LaunchedBy(line, 1), ElementsAre(1, 3));
  }
}

TEST(BucketLineTest, ALaunchMayCompleteTheNext) {
  BucketLine line(2);
  std::vector<std::size_t> launched;
  const BucketLine::Launch nothing = [](std::size_t) { FAIL() << "another launch goes on"; };
  line.Complete(0, [&](std::size_t each) {
    launched.push_back(each);
    if (each == 0) line.Complete(1, nothing);
  });
  EXPECT_THAT(launched, ElementsAre(0, 1));
}

TEST(BucketLineTest, AnErrorOfALaunchComesThroughAndBlocksNobody) {
  BucketLine line(2);
  EXPECT_THROW(line.Complete(0, [](std::size_t) { throw std::runtime_error("a hook"); }),
               std::runtime_error);
  EXPECT_THAT(LaunchedBy(line, 1), ElementsAre(1));
}

TEST(BucketLineTest, ThreadsLaunchOneAtATimeAndInOrder) {
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kEach = 8;
  constexpr int kRounds = 100;
  BucketLine line(kThreads * kEach);
  std::vector<std::size_t> launched;  // without a lock: one at a time
  std::atomic<int> wrong{0};
  std::barrier round(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int r = 0; r < kRounds; ++r) {
        for (std::size_t i = 0; i < kEach; ++i) {
          line.Complete((i * 5 % kEach) * kThreads + t,
                        [&](std::size_t each) { launched.push_back(each); });
        }
        round.arrive_and_wait();
        if (t == 0) {
          for (std::size_t b = 0; b < launched.size(); ++b) wrong += launched[b] != b;
          wrong += launched.size() != kThreads * kEach;
          launched.clear();
        }
        round.arrive_and_wait();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace sirtaki::fusion
