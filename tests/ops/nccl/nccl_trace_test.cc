// What the recorder has of the groups of a device's lane.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/trace/observer.h"
#include "tests/support/device_ranks.h"
#include "tests/support/rank_threads.h"

namespace sirtaki::ops {
namespace {

using core::trace::Event;
using core::trace::EventKind;
using core::trace::Metric;
using core::trace::Track;

TEST(NcclTraceTest, GroupsOfADeviceFollowEachOther) {
  constexpr int kSize = 2;
  constexpr int kGroups = 3;
  tests::FakeGpus gpus;
  InprocWorld world(kSize);
  tests::RankThreads::Run(kSize, [&](int rank) {
    const auto observer = std::make_shared<core::trace::Observer>();
    observer->detail = true;
    tests::DeviceRank device(gpus, world, rank,
                             [&](LanesOptions& options) { options.host.observer = observer; });
    const RunCase c = tests::OnDevice({.signature = {.shape = {100}}});
    std::deque<RunSide> sides(kGroups);
    for (int i = 0; i < kGroups; ++i) {
      std::vector<core::RunItem> items;
      items.push_back(device.OnDevice(
          sides[static_cast<std::size_t>(i)].MakeItem(c, "t" + std::to_string(i), rank, kSize)));
      device.Start(std::move(items));
    }
    device.RunToIdle();
    std::vector<Event> events;
    std::uint64_t lost = 0;
    observer->recorder.Read(0, true, &events, &lost);
    // The rendezvous of the communicator goes over the host.
    std::erase_if(events, [](const Event& event) { return event.track != Track::kDevice; });
    core::TimePoint reached{};
    // By number: the group has begun, its turn has come, or its inputs are there.
    std::map<std::uint64_t, core::TimePoint> from;
    std::uint64_t finished = 0;
    for (const Event& event : events) {
      EXPECT_EQ(event.bytes, 400);
      EXPECT_EQ(event.count, 1U);
      if (event.kind == EventKind::kBegin) {
        from[event.number] = event.begin;
      } else if (event.kind == EventKind::kWait) {  // what makes the inputs is not what moves them
        EXPECT_EQ(event.begin, std::max(from.at(event.number), reached));
        from[event.number] = event.end;
      } else if (event.kind == EventKind::kMove) {
        EXPECT_EQ(event.text(), "nccl");
        EXPECT_EQ(event.begin, std::max(from.at(event.number), reached));
        reached = event.end;
      } else if (event.kind == EventKind::kFinish) {
        EXPECT_EQ(event.number, ++finished);
        EXPECT_GE(event.end, reached);
      }
    }
    EXPECT_EQ(finished, std::uint64_t{kGroups});
    EXPECT_EQ(std::count_if(events.begin(), events.end(),
                            [](const Event& event) { return event.kind == EventKind::kMove; }),
              kGroups);
  });
}

TEST(NcclTraceTest, AGroupThatTheHostReducesForADeviceCountsOnce) {
  constexpr int kSize = 2;
  tests::FakeGpus gpus;
  InprocWorld world(kSize);
  tests::RankThreads::Run(kSize, [&](int rank) {
    const auto observer = std::make_shared<core::trace::Observer>();
    tests::DeviceRank device(gpus, world, rank,
                             [&](LanesOptions& options) { options.host.observer = observer; });
    const RunCase c =
        tests::OnDevice({.signature = {.reduction = core::ReduceOp::kAdasum, .shape = {100}}});
    const RunCase on_host{.signature = {.shape = {100}}};
    std::deque<RunSide> sides(2);
    std::vector<core::RunItem> items;
    items.push_back(device.OnDevice(sides[0].MakeItem(c, "w", rank, kSize)));
    device.Start(std::move(items));
    items.clear();
    items.push_back(sides[1].MakeItem(on_host, "v", rank, kSize));
    device.Start(std::move(items));
    device.RunToIdle();
    const core::trace::Metrics metrics = observer->metrics.Read();
    EXPECT_EQ(metrics.Count(Metric::kGroups), 2);
    EXPECT_EQ(metrics.Count(Metric::kDeviceGroups), 1);
    EXPECT_EQ(metrics.Count(Metric::kTensors), 2);
    EXPECT_EQ(metrics.Count(Metric::kBytes), 800);
    std::vector<Event> events;
    std::uint64_t lost = 0;
    observer->recorder.Read(0, true, &events, &lost);
    // The host's part is drawn, with a number of its own.
    std::vector<std::uint64_t> numbers;
    for (const Event& event : events) {
      if (event.kind == EventKind::kFinish && event.track != Track::kDevice) {
        numbers.push_back(event.number);
      }
    }
    std::sort(numbers.begin(), numbers.end());
    EXPECT_EQ(numbers, (std::vector<std::uint64_t>{1, 2}));
  });
}

}  // namespace
}  // namespace sirtaki::ops
