// Shares on GPUs: all-reduces of which each rank keeps its part, which go as a reduce-scatter, and
// all-gathers of equal rows, over fakes of CUDA and NCCL.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
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
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using tests::DeviceRank;
using tests::FakeGpus;
using tests::OnDevice;
using tests::RankThreads;
using tests::WithoutConnecting;

// What the ranks have of the cases, one rank after the other: of what each keeps a part of, the parts.
std::vector<Memory> ResultsOf(FakeGpus& gpus, int size, const Cases& cases) {
  std::vector<std::vector<Memory>> of_ranks(static_cast<std::size_t>(size));
  InprocWorld world(size);
  RankThreads::Run(size, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    RunSide first;  // who joins later has a GPU, too
    const RunCase any =
        OnDevice({.signature = {.kind = OpKind::kBroadcast, .root = 0, .shape = {4}}});
    device.Start({device.OnDevice(first.MakeItem(any, "first", rank, size))});
    device.RunToIdle();
    std::deque<RunSide> sides(cases.size());
    std::vector<core::RunItem> items;
    for (std::size_t i = 0; i < cases.size(); ++i) {
      items.push_back(
          device.OnDevice(sides[i].MakeItem(cases[i], "t" + std::to_string(i), rank, size)));
    }
    device.Start(std::move(items));
    device.RunToIdle();
    ASSERT_TRUE(device.failure().ok()) << device.failure().ToString();
    for (std::size_t i = 0; i < cases.size(); ++i) {
      if (cases[i].Joined(rank)) continue;
      sides[i].Check(cases[i], rank, size);
      const core::PartCuts cuts = cases[i].Cuts(size);
      const auto bytes = static_cast<std::ptrdiff_t>(core::SizeOf(cases[i].signature.dtype));
      const auto index = static_cast<std::size_t>(rank);
      const auto whole = sides[i].result().begin();
      of_ranks[index].push_back(sides[i].has_part() ? sides[i].part()
                                                    : Memory(whole + (*cuts)[index] * bytes,
                                                             whole + (*cuts)[index + 1] * bytes));
    }
  });
  std::vector<Memory> all;
  for (const auto& of_rank : of_ranks) all.insert(all.end(), of_rank.begin(), of_rank.end());
  return all;
}

// Runs the cases where each rank keeps its part, and where all need the whole. Whether NCCL was asked
// for a reduce-scatter.
bool GoInShares(int size, Cases cases) {
  FakeGpus gpus;
  const std::vector<Memory> parts = ResultsOf(gpus, size, cases);
  const std::size_t scattered = gpus.calls("ncclReduceScatter rank 0").size();
  EXPECT_EQ(WithoutConnecting(gpus.calls("ncclAllReduce rank 0")).size() + scattered, 1u);
  for (RunCase& c : cases) c.in_parts = false;
  gpus.Forget();
  EXPECT_EQ(ResultsOf(gpus, size, cases), parts);
  EXPECT_THAT(gpus.calls("ncclReduceScatter"), IsEmpty());
  return scattered == 1;
}

// A group of several tensors, each of whose parts the ranks keep.
Cases CasesInParts(const core::Signature& like) {
  Cases cases;
  for (const std::int64_t count : {64, 7, 100, 1}) {
    RunCase c = OnDevice({.signature = like, .seed = cases.size()});
    c.signature.shape = {count};
    c.in_parts = true;
    c.part_in_whole = cases.size() % 2 == 1;
    cases.push_back(c);
  }
  return cases;
}

TEST(NcclSharesTest, WhereEachRankKeepsAPartAReduceScatterHasTheBitsOfTheAllReduce) {
  for (const int size : {2, 3}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
      for (const DType dtype : {DType::kF32, DType::kI16, DType::kC64, DType::kF16, DType::kBF16}) {
        SCOPED_TRACE(std::to_string(size) + " ranks, " + std::string(core::ReduceOpName(op)) +
                     " of " + std::string(core::DTypeName(dtype)));
        const double factor = dtype == DType::kF32 ? 0.5 : 1;
        Cases cases = CasesInParts(
            {.reduction = op, .dtype = dtype, .prescale = factor, .postscale = 1 / factor});
        cases[1].absent = size - 1;
        EXPECT_TRUE(GoInShares(size, cases));
        EXPECT_TRUE(GoInShares(size, {cases[2]}));  // one, cut unevenly
      }
    }
  }
}

TEST(NcclSharesTest, OneTensorThatIsCutEvenlyIsScatteredWhereItLies) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
    for (const bool scales : {false, true}) {
      RunCase c = OnDevice({.signature = {.reduction = op, .shape = {2400}}, .in_place = true});
      if (scales) c.signature.prescale = c.signature.postscale = 0.5;
      c.in_parts = c.part_in_whole = true;
      c.parts = {800, 800, 800};
      EXPECT_TRUE(GoInShares(3, {c}));
      FakeGpus gpus;
      ResultsOf(gpus, 3, {c});
      EXPECT_THAT(gpus.calls("cuLaunchKernel"), SizeIs(scales ? 2 * 3 : 0));
      EXPECT_THAT(gpus.calls("ncclMemAlloc"), SizeIs(3));  // that the ranks have from the start
      c.in_place = c.part_in_whole = false;
      c.absent = 1;
      EXPECT_TRUE(GoInShares(3, {c}));
    }
  }
}

TEST(NcclSharesTest, WhatNeedsTheWholeOrMovesNoLessIsAnAllReduce) {
  const Cases cases = CasesInParts({.reduction = ReduceOp::kAverage});
  const auto goes = [&](const std::function<void(Cases&)>& change) {
    Cases changed = cases;
    change(changed);
    return GoInShares(3, std::move(changed));
  };
  EXPECT_TRUE(goes([](Cases&) {}));
  EXPECT_FALSE(goes([](Cases& all) { all[2].in_parts = false; }));
  EXPECT_FALSE(goes([](Cases& all) {
    for (RunCase& c : all) c.joined = RankRanges::Span(1, 1);
  }));
  EXPECT_TRUE(goes([](Cases& all) {
    for (RunCase& c : all) c.signature.wire = DType::kBF16;
  }));
  // All of it belongs to one rank, as of an optimizer that takes whole parameters.
  EXPECT_FALSE(goes([](Cases& all) {
    for (RunCase& c : all) c.parts = {0, c.signature.shape.front(), 0};
  }));
  EXPECT_FALSE(goes([](Cases& all) {
    all = {all[0]};
    all[0].parts = {0, 64, 0};
  }));
}

TEST(NcclSharesTest, RowsAreToldWhileTheDeviceStandsStill) {
  const std::vector<OpKind> kinds = {OpKind::kAllGather, OpKind::kGather, OpKind::kScatter,
                                     OpKind::kAllToAll};
  for (const OpKind kind : kinds) {
    FakeGpus gpus;
    InprocWorld world(2);
    std::atomic<bool> open{false};
    std::barrier both(2);
    const RunCase c =
        OnDevice({.signature = {.kind = kind, .root = 1, .shape = {4}}, .rows = {2, 6}});
    RankThreads::Run(2, [&](int rank) {
      DeviceRank device(gpus, world, rank);
      RunSide first;  // has the lane take its memory
      device.Start({device.OnDevice(first.MakeItem(
          OnDevice({.signature = {.kind = OpKind::kAllReduce, .shape = {4}}}), "first", rank, 2))});
      device.RunToIdle();
      RunSide side;
      both.arrive_and_wait();
      gpus.PutGate(device.producer(), open);
      core::RunItem item = device.OnDevice(side.MakeItem(c, "w", rank, 2));
      device.Start({std::move(item)});
      // Launched, behind a device that has not begun.
      while (!side.handle()->done() && device.failure().ok()) device.lanes().Step();
      EXPECT_TRUE(side.handle()->status().ok()) << side.handle()->status().ToString();
      EXPECT_FALSE(device.lanes().Idle());
      both.arrive_and_wait();
      open = true;
      device.RunToIdle();
      EXPECT_TRUE(device.failure().ok()) << device.failure().ToString();
    });
  }
}

TEST(NcclSharesTest, EqualRowsAreGatheredInOneCallWhereTheyLie) {
  FakeGpus gpus;
  InprocWorld world(3);
  RankThreads::Run(3, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    // Each rank has its part of what all are to have; the last part of the second one is shorter.
    std::vector<std::vector<int>> all = {std::vector<int>(12, -1), std::vector<int>(11, -1)};
    std::vector<core::RunItem> items;
    for (std::vector<int>& whole : all) {
      int* const mine = whole.data() + 4 * rank;
      auto signature = std::make_shared<core::Signature>();
      signature->kind = OpKind::kAllGather;
      signature->dtype = DType::kI32;
      signature->device = core::DeviceKind::kCuda;
      core::RunItem item{{.key = core::Key::Named(core::kWorldSet, std::to_string(items.size())),
                          .signature = std::move(signature)},
                         std::make_shared<core::Work>()};
      item.work->rows = std::min<std::int64_t>(4, whole.data() + whole.size() - mine);
      std::fill_n(mine, item.work->rows, rank);
      item.work->input = mine;
      item.work->allocate_output = [&whole](const std::vector<std::int64_t>&) {
        return whole.data();
      };
      item.work->handle = std::make_shared<core::HandleState>();
      items.push_back(device.OnDevice(std::move(item)));
    }
    device.Start(std::move(items));
    device.RunToIdle();
    ASSERT_TRUE(device.failure().ok()) << device.failure().ToString();
    EXPECT_THAT(all[0], ElementsAre(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2));
    EXPECT_THAT(all[1], ElementsAre(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2));
  });
  EXPECT_THAT(gpus.calls("cuLaunchKernel"), IsEmpty());
  EXPECT_THAT(gpus.calls("ncclAllGather rank 0"), SizeIs(1)) << "of the first one";
  EXPECT_THAT(gpus.calls("ncclSend rank 0"), SizeIs(2));
}

}  // namespace
}  // namespace sirtaki::ops
