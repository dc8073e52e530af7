#include "fusion/gradient_gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <deque>
#include <thread>
#include <vector>

namespace sirtaki::fusion {
namespace {

using GateArrival = GradientGate::Arrival;

TEST(GradientGateTest, OnePassReports) {
  GateCounts counts;
  GradientGate gate(1, counts);
  EXPECT_FALSE(gate.touched());
  EXPECT_EQ(gate.Arrive(), GateArrival::kReport);
  EXPECT_TRUE(gate.touched());
  EXPECT_TRUE(gate.reported());
  EXPECT_EQ(gate.Arrive(), GateArrival::kInFlight);
  gate.Reset();
  EXPECT_FALSE(gate.touched());
  EXPECT_FALSE(gate.reported());
  EXPECT_EQ(gate.Arrive(), GateArrival::kReport);
}

TEST(GradientGateTest, TheLastOfSeveralPassesReports) {
  GateCounts counts;
  GradientGate gate(3, counts);
  for (int step = 0; step < 2; ++step) {
    EXPECT_EQ(gate.Arrive(), GateArrival::kEarly);
    EXPECT_EQ(gate.Arrive(), GateArrival::kEarly);
    EXPECT_FALSE(gate.reported());
    EXPECT_TRUE(gate.touched());
    EXPECT_EQ(gate.Arrive(), GateArrival::kReport);
    EXPECT_EQ(gate.Arrive(), GateArrival::kInFlight);
    gate.Reset();
  }
}

TEST(GradientGateTest, MayBeReportedBeforeItsLastPass) {
  GateCounts counts;
  GradientGate gate(2, counts);
  EXPECT_EQ(gate.Arrive(), GateArrival::kEarly);
  EXPECT_TRUE(gate.Report());
  EXPECT_FALSE(gate.Report());
  EXPECT_EQ(gate.Arrive(), GateArrival::kInFlight);
  gate.Reset();
  EXPECT_EQ(gate.Arrive(), GateArrival::kEarly) << "passes are counted anew";
}

TEST(GradientGateTest, HeldPassesAreSeenButNotCounted) {
  GateCounts counts;
  GradientGate gate(1, counts);
  gate.Hold();
  gate.Hold();
  EXPECT_EQ(gate.Arrive(), GateArrival::kEarly);
  EXPECT_TRUE(gate.touched());
  gate.Release();
  EXPECT_EQ(gate.Arrive(), GateArrival::kEarly) << "holds nest";
  gate.Release();
  EXPECT_EQ(gate.Arrive(), GateArrival::kReport);
  gate.Hold();
  EXPECT_EQ(gate.Arrive(), GateArrival::kInFlight) << "also while it is held";
  gate.Release();
}

TEST(GradientGateTest, CountsTheGatesThatAreReportedOrTouched) {
  GateCounts counts;
  GradientGate held(1, counts);
  {
    GradientGate complete(1, counts);
    GradientGate missing(2, counts);
    held.Hold();
    EXPECT_EQ(held.Arrive(), GateArrival::kEarly);
    complete.Arrive();
    complete.Arrive();
    EXPECT_TRUE(missing.Report());
    EXPECT_FALSE(missing.Report());
    EXPECT_EQ(counts.touched, 2);
    EXPECT_EQ(counts.reported, 2);
    missing.Reset();
    missing.Reset();
    EXPECT_EQ(counts.reported, 1);
  }
  EXPECT_EQ(counts.touched, 1) << "a gate that is gone counts no more";
  EXPECT_EQ(counts.reported, 0);
}

// Several hooks arrive at the same gates at once: each gate is won by one of them, which sees what
// all of them wrote.
TEST(GradientGateTest, ThreadsShareTheGates) {
  constexpr int kGates = 100;
  constexpr int kThreads = 4;
  constexpr int kSteps = 50;
  GateCounts counts;
  std::deque<GradientGate> gates;
  for (int i = 0; i < kGates; ++i) gates.emplace_back(kThreads, counts);
  std::vector<int> written(static_cast<std::size_t>(kGates * kThreads));
  std::atomic<int> wins{0};
  std::atomic<int> unseen{0};
  std::barrier step(kThreads + 1);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int s = 1; s <= kSteps; ++s) {
        step.arrive_and_wait();
        for (int i = 0; i < kGates; ++i) {
          const auto gate = static_cast<std::size_t>((i * 7 + t * 31) % kGates);
          int* const passes = &written[gate * kThreads];
          passes[t] = s;
          const GateArrival arrival = gates[gate].Arrive();
          if (arrival == GateArrival::kInFlight) ++unseen;
          if (arrival != GateArrival::kReport) continue;
          ++wins;
          for (int other = 0; other < kThreads; ++other) unseen += passes[other] != s;
        }
        step.arrive_and_wait();
      }
    });
  }
  for (int s = 0; s < kSteps; ++s) {
    step.arrive_and_wait();
    step.arrive_and_wait();
    EXPECT_EQ(wins.exchange(0), kGates);
    EXPECT_EQ(counts.reported, kGates);
    EXPECT_EQ(counts.touched, kGates);
    for (GradientGate& gate : gates) {
      EXPECT_TRUE(gate.reported());
      gate.Reset();
    }
    EXPECT_EQ(counts.reported, 0);
    EXPECT_EQ(counts.touched, 0);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(unseen, 0);
}

}  // namespace
}  // namespace sirtaki::fusion
