// All-reduces of GPU tensors that cross hosts through the host lanes. The GPUs and NCCL are fakes;
// threads are the ranks, some of which pretend to share a host.
#include "ops/nccl/host_hierarchy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
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
using core::OpKind;
using core::RankRanges;
using core::ReduceOp;
using core::Status;
using core::StatusCode;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using tests::DeviceRank;
using tests::FakeGpus;
using tests::OnDevice;
using tests::RankThreads;

using Hosts = std::vector<int>;

// ---- which member carries what ----

TEST(NcclHostSlicesTest, MembersOfAHostCarryASliceEach) {
  const Hosts hosts = {0, 1, 0, 1, 2};
  const auto slices = nccl::SlicesOf(0, RankRanges::Span(0, 3), 2, hosts);
  ASSERT_NE(slices, nullptr);
  EXPECT_EQ(slices->here.ToVector(), (std::vector<int>{0, 2}));
  EXPECT_EQ(slices->carriers.ToVector(), (std::vector<int>{2, 3}));
  const auto other = nccl::SlicesOf(0, RankRanges::Span(0, 3), 1, hosts);
  EXPECT_EQ(other->here.ToVector(), (std::vector<int>{1, 3}));
  EXPECT_EQ(other->carriers.ToVector(), (std::vector<int>{0, 1}));
  EXPECT_NE(other->set, slices->set);
  EXPECT_EQ(nccl::SlicesOf(0, RankRanges::Span(0, 3), 3, hosts)->set, slices->set);
  EXPECT_NE(nccl::SlicesOf(1, RankRanges::Span(0, 3), 3, hosts)->set, slices->set);
}

TEST(NcclHostSlicesTest, NoneWhereHostsDifferOrThereIsOne) {
  const Hosts hosts = {0, 0, 1, 1, 2};
  EXPECT_EQ(nccl::SlicesOf(0, RankRanges::Span(0, 4), 0, hosts), nullptr);
  EXPECT_EQ(nccl::SlicesOf(3, RankRanges::Span(0, 1), 0, hosts), nullptr);
  EXPECT_NE(nccl::SlicesOf(3, RankRanges::Span(1, 2), 1, hosts), nullptr);  // one on each
}

// ---- reductions ----

using Change = std::function<void(int rank, LanesOptions&)>;

class NcclHostHierarchyTest : public ::testing::Test {
 protected:
  void RunRanks(const Hosts& hosts, const std::function<void(DeviceRank& device, int rank)>& body,
                const Change& change = nullptr) {
    const int size = static_cast<int>(hosts.size());
    InprocWorld world(size);
    RankThreads::Run(size, [&](int rank) {
      DeviceRank device(gpus_, world, rank, [&](LanesOptions& options) {
        options.host_of_rank = hosts;
        if (change) change(rank, options);
      });
      body(device, rank);
    });
  }

  // All cases in one batch on every rank; then each is checked.
  void RunCases(const Hosts& hosts, const Cases& cases) {
    const int size = static_cast<int>(hosts.size());
    RunRanks(hosts, [&](DeviceRank& device, int rank) {
      std::deque<RunSide> sides(cases.size());
      std::vector<core::RunItem> items;
      for (std::size_t i = 0; i < cases.size(); ++i) {
        items.push_back(
            device.OnDevice(sides[i].MakeItem(cases[i], "t" + std::to_string(i), rank, size)));
      }
      device.Start(std::move(items));
      device.RunToIdle();
      ASSERT_TRUE(device.failure().ok()) << device.failure().ToString();
      for (std::size_t i = 0; i < cases.size(); ++i) sides[i].Check(cases[i], rank, size);
    });
  }

  FakeGpus gpus_;
};

Cases OnDevices(Cases cases) {
  for (RunCase& c : cases) c = OnDevice(std::move(c));
  return cases;
}

Cases AllReducesOf(ReduceOp op, DType dtype, int size) {
  Cases cases = OnDevices(ReducingCases(op, dtype, size));
  std::erase_if(cases, [](const RunCase& c) { return c.signature.kind != OpKind::kAllReduce; });
  return cases;
}

TEST_F(NcclHostHierarchyTest, ReducesAsNcclAloneDoes) {
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 0, 1}, Hosts{0, 1},
                             Hosts{0, 0, 0, 1, 1, 1}, Hosts{0, 1, 2, 0, 1, 2}}) {
    for (const ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      Cases cases;
      for (const DType dtype : {DType::kF32, DType::kF64, DType::kI8, DType::kU8, DType::kI16,
                                DType::kI32, DType::kI64, DType::kC64}) {
        if (!core::IsDefined(op, dtype)) continue;
        const Cases more = AllReducesOf(op, dtype, static_cast<int>(hosts.size()));
        cases.insert(cases.end(), more.begin(), more.end());
      }
      RunCases(hosts, cases);
    }
  }
  EXPECT_THAT(gpus_.calls("ncclReduceScatter"), Not(IsEmpty()));
  EXPECT_EQ(gpus_.live_communicators(), 0);
}

TEST_F(NcclHostHierarchyTest, NcclDoesNotCrossHosts) {
  RunCases({0, 0, 1, 1}, {OnDevice({.signature = {.shape = {500}}})});
  EXPECT_THAT(gpus_.calls("ncclAllReduce"), IsEmpty());
  EXPECT_THAT(gpus_.calls("ncclReduceScatter"), SizeIs(4));
  EXPECT_THAT(gpus_.calls("ncclAllGather"), SizeIs(4));
  EXPECT_THAT(gpus_.calls("ncclGetUniqueId"), SizeIs(3));  // of all, and of each host
}

TEST_F(NcclHostHierarchyTest, HalfTypesAreRoundedOnTheirWay) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
      const RunCase c =
          OnDevice({.signature = {.reduction = op, .dtype = dtype, .shape = {300}}, .seed = 3});
      std::vector<Memory> results(4);
      RunRanks({0, 0, 1, 1}, [&](DeviceRank& device, int rank) {
        RunSide side;
        device.Start({device.OnDevice(side.MakeItem(c, "w", rank, 4))});
        device.RunToIdle();
        ASSERT_TRUE(device.failure().ok()) << device.failure().ToString();
        results[static_cast<std::size_t>(rank)] = side.result();
      });
      EXPECT_THAT(results, Each(results[0]));
      const std::vector<double> found = AsDoubles(dtype, results[0]);
      const std::vector<double> expected = AsDoubles(dtype, *ExpectedOf(c, 0, 4));
      const double step = dtype == DType::kF16 ? 1.0 / 1024 : 1.0 / 128;
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_NEAR(found[i], expected[i], 4 * step * std::abs(expected[i]) + step) << i;
      }
    }
  }
}

TEST_F(NcclHostHierarchyTest, ScalesBeforeAndAfter) {
  Cases cases;
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    for (const bool in_place : {false, true}) {
      for (const std::int64_t count : {1, 31, 800}) {
        cases.push_back(OnDevice(
            {.signature = {.dtype = dtype, .shape = {count, 2}, .prescale = 0.5, .postscale = 3.0},
             .in_place = in_place,
             .seed = cases.size()}));
      }
    }
  }
  RunCases({0, 0, 1, 1}, cases);
}

TEST_F(NcclHostHierarchyTest, AnAbsentGradientAndAJoinedRankGiveNothing) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kAverage}) {
    Cases cases;
    for (const std::int64_t count : {1, 40, 2000}) {
      RunCase c{.signature = {.reduction = op, .shape = {count}}, .seed = cases.size()};
      cases.push_back(OnDevice(c));
      c.absent = 1;
      cases.push_back(OnDevice(c));
      c.absent = -1;
      c.joined = RankRanges::Span(2, 2);
      cases.push_back(OnDevice(c));
    }
    RunCases({0, 0, 1, 1}, cases);
  }
}

// Broadcasts, reductions that NCCL does not do, Adasum and the host's own keep their places.
TEST_F(NcclHostHierarchyTest, WhatGoesAnotherWayGoesBesideIt) {
  Cases cases;
  for (std::uint64_t i = 0; i < 30; ++i) {
    RunCase c{.signature = {.shape = {static_cast<std::int64_t>(20 + 40 * (i % 7))}}, .seed = i};
    if (i % 5 == 1) c.signature = {.kind = OpKind::kBroadcast, .root = 1, .shape = {90}};
    if (i % 5 == 2) {
      c.signature.reduction = ReduceOp::kBitXor;
      c.signature.dtype = DType::kI32;
    }
    if (i % 5 == 3) c.signature.kind = OpKind::kReduceScatter;
    cases.push_back(i % 6 == 5 ? c : OnDevice(c));
  }
  RunRanks({0, 0, 1, 1}, [&](DeviceRank& device, int rank) {
    std::deque<RunSide> sides(cases.size());
    for (std::size_t i = 0; i < cases.size(); ++i) {
      core::RunItem item = sides[i].MakeItem(cases[i], "t" + std::to_string(i), rank, 4);
      const bool on_device = cases[i].signature.device == core::DeviceKind::kCuda;
      device.Start({on_device ? device.OnDevice(std::move(item)) : std::move(item)});
    }
    device.RunToIdle();
    ASSERT_TRUE(device.failure().ok()) << device.failure().ToString();
    for (std::size_t i = 0; i < cases.size(); ++i) sides[i].Check(cases[i], rank, 4);
  });
}

TEST_F(NcclHostHierarchyTest, HostsThatDifferLeaveItToNccl) {
  RunCases({0, 0, 1}, {OnDevice({.signature = {.shape = {500}}})});
  EXPECT_THAT(gpus_.calls("ncclAllReduce"), SizeIs(3));
  EXPECT_THAT(gpus_.calls("ncclReduceScatter"), IsEmpty());
  EXPECT_THAT(gpus_.calls("ncclGetUniqueId"), SizeIs(1));
}

TEST_F(NcclHostHierarchyTest, ASetComesAndGoes) {
  const RunCase c = OnDevice({.signature = {.shape = {40}}});
  RunRanks({0, 0, 1, 1}, [&](DeviceRank& device, int rank) {
    const auto change = [&](bool adds) {
      auto work = std::make_shared<core::Work>();
      work->handle = std::make_shared<core::HandleState>(nullptr, nullptr);
      if (adds) {
        device.lanes().AddSet(5, RankRanges::Span(1, 2), work, core::Clock::now());
      } else {
        device.lanes().RemoveSet(5, work, core::Clock::now());
      }
      device.RunToIdle();
    };
    for (int round = 0; round < 2; ++round) {
      change(true);
      RunSide some;
      if (rank == 1 || rank == 2) {
        device.Start({device.OnDevice(some.MakeItem(c, "some", rank - 1, 2))}, 5);
        device.RunToIdle();
      }
      change(false);
      ASSERT_TRUE(device.failure().ok()) << device.failure().ToString();
      if (rank == 1 || rank == 2) some.Check(c, rank - 1, 2);
    }
  });
  EXPECT_THAT(gpus_.calls("ncclAllReduce"), IsEmpty());
  EXPECT_EQ(gpus_.live_communicators(), 0);
}

// The host's part of what is refused holds up nothing.
TEST_F(NcclHostHierarchyTest, ASetThatCannotUseItsGpusHasTheHost) {
  const RunCase c = OnDevice({.signature = {.shape = {40}}});
  const RunCase on_host{.signature = {.shape = {400}}};
  RunRanks(
      {0, 0, 1, 1},
      [&](DeviceRank& device, int rank) {
        for (const char* name : {"first", "second"}) {
          RunSide side;
          device.Start({device.OnDevice(side.MakeItem(c, name, rank, 4))});
          device.RunToIdle();
          ASSERT_TRUE(side.handle()->done());
          EXPECT_THAT(side.handle()->status().message(), HasSubstr("rank 1 cannot use its GPU"));
        }
        RunSide side;
        device.Start({side.MakeItem(on_host, "host", rank, 4)});
        device.RunToIdle();
        EXPECT_TRUE(device.failure().ok()) << device.failure().ToString();
        side.Check(on_host, rank, 4);
      },
      [](int rank, LanesOptions& options) {
        if (rank != 1) return;
        options.load_nccl = [](nccl::Library*) {
          return Status(StatusCode::kUnsupported, "no NCCL");
        };
      });
}

TEST_F(NcclHostHierarchyTest, WhoJoinedBeforeItUsedAGpuHoldsUpNothing) {
  RunCase c = OnDevice({.signature = {.shape = {40}}});
  c.joined = RankRanges::Span(3, 3);
  const RunCase on_host{.signature = {.shape = {400}}};
  RunRanks({0, 0, 1, 1}, [&](DeviceRank& device, int rank) {
    RunSide side;
    device.Start({device.OnDevice(side.MakeItem(c, "w", rank, 4))});
    device.RunToIdle();
    if (rank != 3) {
      EXPECT_THAT(side.handle()->status().message(), HasSubstr("rank 3 cannot use its GPU"));
    }
    RunSide after;
    device.Start({after.MakeItem(on_host, "host", rank, 4)});
    device.RunToIdle();
    EXPECT_TRUE(device.failure().ok()) << device.failure().ToString();
    after.Check(on_host, rank, 4);
    // When the join is over it knows of it like the others.
    const RunCase all = OnDevice({.signature = {.shape = {40}}});
    RunSide later;
    device.Start({device.OnDevice(later.MakeItem(all, "later", rank, 4))});
    device.RunToIdle();
    EXPECT_TRUE(device.failure().ok()) << device.failure().ToString();
    EXPECT_THAT(later.handle()->status().message(), HasSubstr("rank 3 cannot use its GPU"));
  });
}

TEST_F(NcclHostHierarchyTest, AFailureWithinAHostIsTheGroupsFault) {
  const RunCase c = OnDevice({.signature = {.shape = {400}}});
  for (const char* function : {"ncclReduceScatter", "ncclAllGather", "cudaMemcpyAsync"}) {
    gpus_.FailNext(function, 3);
    std::atomic<bool> failed{false};
    std::atomic<bool> named{false};
    RunRanks({0, 0, 1, 1}, [&](DeviceRank& device, int rank) {
      RunSide side;
      device.Start({device.OnDevice(side.MakeItem(c, "w", rank, 4))});
      while (!device.lanes().Idle()) {
        device.lanes().Step(core::Clock::now());
        if (!device.failure().ok()) failed = true;  // its host's part still waits
        if (failed) device.lanes().Abandon({StatusCode::kPeerLost, "another rank has failed"});
        std::this_thread::yield();
      }
      // Told before the handle is.
      while (!side.handle()->done()) std::this_thread::yield();
      if (device.failure().ok()) return;
      failed = true;
      const std::string text = device.failure().message();
      if (text.find(function) != std::string::npos) named = true;
    });
    EXPECT_TRUE(named) << function;
  }
}

}  // namespace
}  // namespace sirtaki::ops
