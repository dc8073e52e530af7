// Adasum of tensors on GPUs, which the host computes: the same bytes as of tensors of the host, in
// the order of all else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/device_ranks.h"
#include "tests/support/rank_threads.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::ReduceOp;
using core::Status;
using core::StatusCode;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using tests::DeviceRank;
using tests::FakeGpus;
using tests::OnDevice;
using tests::RankThreads;

RunCase Adasum(std::int64_t count, DType dtype = DType::kF32) {
  return {.signature = {.reduction = ReduceOp::kAdasum, .dtype = dtype, .shape = {count}},
          .seed = static_cast<std::uint64_t>(count)};
}

Cases AllCases() {
  Cases cases;
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    for (const std::int64_t count : {0, 1, 7, 700}) cases.push_back(Adasum(count, dtype));
    cases.push_back(Adasum(33, dtype));
    cases.back().in_place = true;
    cases.push_back(Adasum(65, dtype));
    cases.back().signature.prescale = 0.5;
    cases.back().signature.postscale = 4.0;
  }
  return cases;
}

// On GPUs in one batch, and on the host in another.
void CompareWithHost(int size, const Cases& cases) {
  FakeGpus gpus;
  InprocWorld world(size);
  RankThreads::Run(size, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    std::deque<RunSide> on_device(cases.size());
    std::deque<RunSide> on_host(cases.size());
    std::vector<core::RunItem> items;
    std::vector<core::RunItem> host_items;
    const Cases device_cases = [&cases] {
      Cases made;
      for (const RunCase& c : cases) made.push_back(OnDevice(c));
      return made;
    }();
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const std::string name = "t" + std::to_string(i);
      items.push_back(device.OnDevice(on_device[i].MakeItem(device_cases[i], name, rank, size)));
      host_items.push_back(on_host[i].MakeItem(cases[i], "host " + name, rank, size));
    }
    device.Start(std::move(items));
    device.Start(std::move(host_items));
    device.RunToIdle();
    ASSERT_TRUE(device.failure().ok()) << device.failure().ToString();
    for (std::size_t i = 0; i < cases.size(); ++i) {
      if (cases[i].Joined(rank)) continue;
      ASSERT_TRUE(on_device[i].handle()->done());
      EXPECT_TRUE(on_device[i].result() == on_host[i].result()) << cases[i].ToString();
      const bool is_sum = size > 1 && cases[i].signature.ElementCount() > 1;
      if (is_sum && !cases[i].in_place) {
        EXPECT_FALSE(on_device[i].result() == InputOf(cases[i], rank));
      }
    }
  });
}

TEST(NcclAdasumTest, GivesTheBytesOfTheHost) {
  for (const int size : {1, 2, 3, 4}) {
    SCOPED_TRACE(size);
    CompareWithHost(size, AllCases());
  }
}

TEST(NcclAdasumTest, WhoHasJoinedOrHasNoneTakesPart) {
  Cases cases = AllCases();
  for (RunCase& c : cases) c.joined = core::RankRanges::Span(1, 1);
  CompareWithHost(3, cases);
  for (RunCase& c : cases) {
    c.joined = {};
    c.absent = 2;
  }
  CompareWithHost(3, cases);
}

TEST(NcclAdasumTest, KeepsItsPlaceAmongWhatNcclReduces) {
  FakeGpus gpus;
  InprocWorld world(2);
  const RunCase sum = OnDevice({.signature = {.shape = {500}}});
  const RunCase adasum = OnDevice(Adasum(500));
  RankThreads::Run(2, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    std::deque<RunSide> sides(6);
    for (std::size_t i = 0; i < sides.size(); ++i) {
      const RunCase& c = i % 2 == 0 ? adasum : sum;
      device.Start({device.OnDevice(sides[i].MakeItem(c, std::to_string(i), rank, 2))});
    }
    device.RunToIdle();
    ASSERT_TRUE(device.failure().ok()) << device.failure().ToString();
    for (std::size_t i = 1; i < sides.size(); i += 2) sides[i].Check(sum, rank, 2);
    EXPECT_TRUE(sides[0].result() == sides[4].result());
  });
}

TEST(NcclAdasumTest, TakesNoCommunicator) {
  FakeGpus gpus;
  InprocWorld world(2);
  const RunCase adasum = OnDevice(Adasum(500));
  RankThreads::Run(2, [&](int rank) {
    DeviceRank device(gpus, world, rank, [](LanesOptions& options) { options.kernels = nullptr; });
    RunSide side;
    device.Start({device.OnDevice(side.MakeItem(adasum, "w", rank, 2))});
    device.RunToIdle();
    EXPECT_TRUE(device.failure().ok()) << device.failure().ToString();
  });
  EXPECT_THAT(gpus.calls("nccl"), IsEmpty());
  EXPECT_THAT(gpus.calls("cuModuleLoadData"), IsEmpty());
}

TEST(NcclAdasumTest, AbandoningEndsOneWhoseTensorsNeverCome) {
  FakeGpus gpus;
  gpus.Hold();
  InprocWorld world(1);
  const RunCase adasum = OnDevice(Adasum(500));
  DeviceRank device(gpus, world, 0);
  RunSide side;
  device.Start({device.OnDevice(side.MakeItem(adasum, "w", 0, 1))});
  while (gpus.calls("cudaMemcpyAsync").empty()) device.lanes().Step();
  EXPECT_FALSE(side.handle()->done());
  device.lanes().Abandon({StatusCode::kPeerLost, "rank 1 is lost"});
  ASSERT_TRUE(side.handle()->done());
  EXPECT_THAT(side.handle()->status().message(), HasSubstr("rank 1 is lost"));
  EXPECT_TRUE(device.lanes().Idle());
}

// The host's lane may still be at them, and so may its medium.
TEST(NcclAdasumTest, AFaultLeavesThePagesToTheHost) {
  FakeGpus gpus;
  InprocWorld world(2);
  const RunCase adasum = OnDevice(Adasum(500));
  const auto observer = std::make_shared<core::trace::Observer>();
  observer->detail = true;
  RankThreads::Run(2, [&](int rank) {
    DeviceRank device(gpus, world, rank,
                      [&](LanesOptions& options) { options.host.observer = observer; });
    if (rank == 1) return;  // never takes part
    RunSide side;
    device.Start({device.OnDevice(side.MakeItem(adasum, "w", rank, 2))});
    const auto is_at_them = [&] {
      std::vector<core::trace::Event> events;
      std::uint64_t lost = 0;
      observer->recorder.Read(0, true, &events, &lost);
      return std::ranges::any_of(events, [](const core::trace::Event& event) {
        return event.track != core::trace::Track::kDevice;
      });
    };
    while (!is_at_them()) {
      device.lanes().Step();
      std::this_thread::yield();
    }
    device.lanes().Abandon({StatusCode::kPeerLost, "rank 1 is lost"});
    EXPECT_TRUE(side.handle()->done());
    device.EndLanes();
    EXPECT_THAT(gpus.calls("cudaFreeHost"), IsEmpty());
  });
}

TEST(NcclAdasumTest, ACopyThatFailsIsTheGroupsFault) {
  FakeGpus gpus;
  gpus.FailNext("cudaMemcpyAsync", 700);
  InprocWorld world(1);
  const RunCase adasum = OnDevice(Adasum(500));
  DeviceRank device(gpus, world, 0);
  RunSide side;
  device.Start({device.OnDevice(side.MakeItem(adasum, "w", 0, 1))});
  while (!side.handle()->done()) std::this_thread::yield();
  EXPECT_THAT(side.handle()->status().message(), HasSubstr("cudaMemcpyAsync"));
  EXPECT_EQ(device.failed_tensor(), "w");
  device.lanes().Abandon(device.failure());  // as the engine does
}

}  // namespace
}  // namespace sirtaki::ops
