// What the recorder has of the groups of a device's lane.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
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
    // The meeting of the communicator goes over the host.
    std::erase_if(events, [](const Event& event) { return event.track != Track::kDevice; });
    core::TimePoint reached{};
    std::uint64_t finished = 0;
    for (const Event& event : events) {
      EXPECT_EQ(event.bytes, 400);
      EXPECT_EQ(event.count, 1U);
      if (event.kind == EventKind::kMove) {
        EXPECT_EQ(event.text(), "nccl");
        EXPECT_GE(event.begin, reached);
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

}  // namespace
}  // namespace sirtaki::ops
