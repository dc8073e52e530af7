// Every collective on GPUs, over fakes that keep streams, events and communicators as the real ones
// do: what all ranks have afterwards, byte by byte, and the order of what they call.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/device_ranks.h"
#include "tests/support/rank_threads.h"
#include "tests/support/test_scale.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::OpKind;
using core::RankRanges;
using core::ReduceOp;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using tests::DeviceRank;
using tests::FakeGpus;
using tests::OnDevice;
using tests::RankThreads;
using tests::WithoutConnecting;

using LanesChange = std::function<void(LanesOptions&)>;

// All cases in one batch on every rank; then each is checked.
void RunCases(FakeGpus& gpus, int size, const Cases& cases, const LanesChange& change = nullptr) {
  InprocWorld world(size);
  RankThreads::Run(size, [&](int rank) {
    DeviceRank device(gpus, world, rank, change);
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

Cases DeviceCases(Cases cases) {
  for (RunCase& c : cases) c = OnDevice(std::move(c));
  return cases;
}

TEST(NcclLanesTest, ReducesEveryTypeByEveryOperation) {
  for (const int size : {1, 2, 3}) {
    for (int o = 0; o < core::kReduceOpCount; ++o) {
      Cases cases;
      for (int d = 0; d < core::kDTypeCount; ++d) {
        const auto op = static_cast<ReduceOp>(o);
        const auto dtype = static_cast<DType>(d);
        if (op == ReduceOp::kAdasum || !core::IsDefined(op, dtype)) continue;
        const Cases more = DeviceCases(ReducingCases(op, dtype, size));
        cases.insert(cases.end(), more.begin(), more.end());
      }
      FakeGpus gpus;
      RunCases(gpus, size, cases);
    }
  }
}

TEST(NcclLanesTest, ScalesBeforeAndAfter) {
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter}) {
    Cases cases;
    for (const DType dtype : {DType::kF32, DType::kF64, DType::kC64}) {
      for (const bool in_place : {false, true}) {
        if (in_place && kind == OpKind::kReduceScatter) continue;
        for (const std::int64_t count : {4, 31, 800}) {
          RunCase c{.signature = {.kind = kind,
                                  .dtype = dtype,
                                  .root = kind == OpKind::kReduce ? 1 : -1,
                                  .shape = {count, 2},
                                  .prescale = 0.5,
                                  .postscale = 3.0},
                    .in_place = in_place,
                    .seed = cases.size()};
          cases.push_back(OnDevice(c));
        }
      }
    }
    FakeGpus gpus;
    RunCases(gpus, 2, cases);
  }
}

TEST(NcclLanesTest, AnAbsentGradientAndAJoinedRankGiveNothing) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kProduct, ReduceOp::kAverage,
                            ReduceOp::kBitAnd}) {
    for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter}) {
      const DType dtype = op == ReduceOp::kBitAnd ? DType::kI16 : DType::kF32;
      Cases cases;
      for (const std::int64_t count : {1, 40, 2000}) {
        RunCase c{.signature = {.kind = kind, .reduction = op, .dtype = dtype, .shape = {count}},
                  .seed = cases.size()};
        cases.push_back(OnDevice(c));
        c.absent = 1;
        cases.push_back(OnDevice(c));
        c.absent = -1;
        c.joined = RankRanges::Span(2, 2);
        cases.push_back(OnDevice(c));
      }
      FakeGpus gpus;
      RunCases(gpus, 3, cases);
    }
  }
}

TEST(NcclLanesTest, MovesWhatOnlyMoves) {
  for (const int size : {1, 2, 3}) {
    Cases cases;
    for (const DType dtype : {DType::kU8, DType::kF64, DType::kBool, DType::kF8E5M2}) {
      for (int root = 0; root < size; ++root) {
        for (const bool in_place : {false, true}) {
          cases.push_back({.signature = {.kind = OpKind::kBroadcast,
                                         .dtype = dtype,
                                         .root = root,
                                         .shape = {7, 31}},
                           .in_place = in_place,
                           .seed = cases.size()});
        }
        for (const OpKind kind : {OpKind::kGather, OpKind::kScatter}) {
          const Cases more = CasesWithRows(kind, dtype, root, size);
          cases.insert(cases.end(), more.begin(), more.end());
        }
      }
      for (const OpKind kind : {OpKind::kAllGather, OpKind::kAllToAll}) {
        const Cases more = CasesWithRows(kind, dtype, -1, size);
        cases.insert(cases.end(), more.begin(), more.end());
      }
      for (const std::int64_t count : {0, 1, 500}) {
        cases.push_back(
            {.signature = {.kind = OpKind::kAllGatherInto, .dtype = dtype, .shape = {count}},
             .seed = cases.size()});
      }
    }
    FakeGpus gpus;
    RunCases(gpus, size, DeviceCases(cases));
  }
}

TEST(NcclLanesTest, JoinedRanksServeWhatOnlyMoves) {
  Cases cases;
  const RankRanges joined = RankRanges::Span(1, 1);
  // So that the rank has a GPU to serve with.
  cases.push_back({.signature = {.shape = {4}}});
  for (const std::int64_t count : {50, 3, 70}) {
    cases.push_back(
        {.signature = {.kind = OpKind::kBroadcast, .root = 2, .shape = {count}}, .joined = joined});
    cases.push_back(
        {.signature = {.kind = OpKind::kAllGatherInto, .shape = {count}}, .joined = joined});
  }
  for (const OpKind kind : {OpKind::kAllGather, OpKind::kGather, OpKind::kAllToAll}) {
    RunCase c{.signature = {.kind = kind, .root = kind == OpKind::kGather ? 0 : -1, .shape = {5}},
              .rows = {3, 6, 9},
              .joined = joined};
    cases.push_back(c);
  }
  for (std::size_t i = 0; i < cases.size(); ++i) cases[i].seed = i;
  FakeGpus gpus;
  RunCases(gpus, 3, DeviceCases(cases));
}

TEST(NcclLanesTest, CallsInProgressAreInTheStreamBeforeItsEndIsMarked) {
  Cases cases = DeviceCases(ReducingCases(ReduceOp::kSum, DType::kF32, 2));
  const Cases more = DeviceCases(CasesWithRows(OpKind::kAllToAll, DType::kI32, -1, 2));
  cases.insert(cases.end(), more.begin(), more.end());
  for (const int times : {1, 5}) {
    FakeGpus gpus;
    gpus.AnswerInProgress(times);
    RunCases(gpus, 2, cases);
  }
}

TEST(NcclLanesTest, HostAndDeviceWorkOfOneBatchGoTheirWays) {
  Cases cases;
  for (int i = 0; i < 12; ++i) {
    RunCase c{.signature = {.shape = {i * 30}}, .seed = static_cast<std::uint64_t>(i)};
    cases.push_back(i % 2 == 0 ? OnDevice(c) : c);
  }
  FakeGpus gpus;
  InprocWorld world(2);
  RankThreads::Run(2, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    std::deque<RunSide> sides(cases.size());
    std::vector<core::RunItem> items;
    for (std::size_t i = 0; i < cases.size(); ++i) {
      core::RunItem item = sides[i].MakeItem(cases[i], "t" + std::to_string(i), rank, 2);
      items.push_back(i % 2 == 0 ? device.OnDevice(std::move(item)) : std::move(item));
    }
    device.Start(std::move(items));
    device.RunToIdle();
    for (std::size_t i = 0; i < cases.size(); ++i) sides[i].Check(cases[i], rank, 2);
  });
}

TEST(NcclLanesTest, OneTensorIsReducedWhereItLiesAndManyArePacked) {
  const RunCase alone = OnDevice({.signature = {.shape = {5000}}, .in_place = true});  // > fusion
  FakeGpus gpus;
  RunCases(gpus, 2, {alone});
  EXPECT_THAT(gpus.calls("cuLaunchKernel"), IsEmpty());
  EXPECT_EQ(gpus.calls("ncclMemAlloc").size(), 2u);  // that the ranks have from the start
  EXPECT_EQ(WithoutConnecting(gpus.calls("ncclAllReduce rank 0")).size(), 1u);

  gpus.Forget();
  Cases many;
  for (int i = 0; i < 6; ++i) many.push_back(OnDevice({.signature = {.shape = {100}}}));
  RunCases(gpus, 2, many);
  EXPECT_EQ(WithoutConnecting(gpus.calls("ncclAllReduce rank 0")).size(), 1u);
  EXPECT_EQ(gpus.calls("cuLaunchKernel").size(), 2u * 2u);  // in and out, on both
}

TEST(NcclLanesTest, WhatTravelsCompressedIsConvertedOnTheWay) {
  // Few enough bits that nothing is rounded.
  RunCase c = OnDevice({.signature = {.wire = DType::kF16, .shape = {300}}, .seed = 5});
  FakeGpus gpus;
  RunCases(gpus, 2, {c});
  EXPECT_THAT(gpus.calls("cuLaunchKernel"),
              ::testing::IsSupersetOf({"cuLaunchKernel sirtaki_convert_float16_float32",
                                       "cuLaunchKernel sirtaki_convert_float32_float16"}));
  EXPECT_THAT(WithoutConnecting(gpus.calls("ncclAllReduce rank 0")).front(), HasSubstr("type 6"));
}

TEST(NcclLanesTest, RanksConnectAndTakeMemoryWhenTheirCommunicatorIsMade) {
  FakeGpus gpus;
  InprocWorld world(2);
  std::barrier both(2);
  const auto once = [&](int rank, const std::function<void()>& call) {
    both.arrive_and_wait();
    if (rank == 0) call();
    both.arrive_and_wait();
  };
  gpus.Hold();  // nothing of it waits for a device
  RankThreads::Run(2, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    std::deque<RunSide> sides(2);
    const RunCase c = OnDevice({.signature = {.shape = {5000}}});
    device.Start({device.OnDevice(sides[0].MakeItem(c, "first", rank, 2))});
    while (!sides[0].handle()->done()) device.lanes().Step();
    once(rank, [&] {
      for (const char* of : {"ncclAllReduce rank 0 ", "ncclAllReduce rank 1 "}) {
        const std::string least = of + std::string("count 1 type 7 op 0");
        const std::string more = of + std::string("count 262144 type 7 op 0");
        // The parent connects, and then the one that was split from it.
        EXPECT_THAT(gpus.calls(of), ElementsAre(least, more, least, more,
                                                of + std::string("count 5000 type 7 op 0")));
      }
      // Each rank has taken its pages before it came to the communicator.
      const std::vector<std::string> all = gpus.calls();
      const auto is_of = [](const char* function) {
        return [function](const std::string& call) { return call.starts_with(function); };
      };
      const auto last = std::find_if(all.rbegin(), all.rend(), is_of("ncclCommInitRankConfig"));
      EXPECT_EQ(std::count_if(last, all.rend(), is_of("cudaHostAlloc")), 2);
      EXPECT_THAT(gpus.calls("cudaHostAlloc"), SizeIs(2));
      gpus.Forget();
      gpus.Release();
    });
    const Cases more = {OnDevice({.signature = {.shape = {100}}}),
                        OnDevice({.signature = {.dtype = DType::kF64, .shape = {300}}})};
    for (std::size_t i = 0; i < more.size(); ++i) {
      device.Start({device.OnDevice(sides[1].MakeItem(more[i], std::to_string(i), rank, 2))});
      device.RunToIdle();
      sides[1].Check(more[i], rank, 2);
    }
    sides[0].Check(c, rank, 2);
    once(rank, [&] {
      EXPECT_THAT(gpus.calls("ncclMemAlloc"), IsEmpty());
      EXPECT_THAT(gpus.calls("cudaHostAlloc"), IsEmpty());
    });
  });
  EXPECT_EQ(gpus.live_allocations(), 0);
}

TEST(NcclLanesTest, NothingRunsBeforeItsProducer) {
  FakeGpus gpus;
  InprocWorld world(2);
  RankThreads::Run(2, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    const RunCase c = OnDevice({.signature = {.dtype = DType::kU8, .shape = {64}}});
    RunSide first;
    device.Start({device.OnDevice(first.MakeItem(c, "first", rank, 2))});
    device.RunToIdle();  // what a communicator takes has waited for the device
    RunSide side;
    core::RunItem item = side.MakeItem(c, "w", rank, 2);
    // What the backward pass writes is in the stream, but not in the memory yet.
    std::vector<std::byte> gradient(64, std::byte{0xEE});
    item.work->input = gradient.data();
    std::atomic<bool> written{false};
    gpus.PutGate(device.producer(), written);
    gpus.PutWrite(device.producer(), gradient.data(), rank + 1, gradient.size());
    const auto* output = static_cast<const std::byte*>(item.work->output);
    device.Start({device.OnDevice(std::move(item))});
    while (!side.handle()->done()) device.lanes().Step();
    gpus.RunDevices();
    EXPECT_EQ(output[0], std::byte{0xCD});
    written = true;
    device.RunToIdle();
    EXPECT_EQ(output[0], std::byte{3});
    EXPECT_EQ(output[63], std::byte{3});
  });
}

TEST(NcclLanesTest, AHandleIsDoneWhenItsGroupIsLaunched) {
  FakeGpus gpus;
  InprocWorld world(2);
  std::barrier both(2);
  RankThreads::Run(2, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    const RunCase c = OnDevice({.signature = {.dtype = DType::kU8, .shape = {64}}});
    RunSide first;
    device.Start({device.OnDevice(first.MakeItem(c, "first", rank, 2))});
    device.RunToIdle();  // the communicator is there
    both.arrive_and_wait();
    gpus.Hold();
    both.arrive_and_wait();
    RunSide side;
    core::RunItem item = device.OnDevice(side.MakeItem(c, "w", rank, 2));
    const auto work = std::static_pointer_cast<cuda::DeviceWork>(item.work);
    device.Start({std::move(item)});
    while (!side.handle()->done()) device.lanes().Step();
    EXPECT_FALSE(device.lanes().Idle());
    EXPECT_THAT(device.lanes().Running().at(0).what, HasSubstr("all-reduce of \"w\""));
    ASSERT_NE(work->done, nullptr);
    // The optimizer's stream waits, not its thread.
    cuda::StreamHandle optimizer = gpus.MakeStream();
    ASSERT_TRUE(AwaitDone(*work, optimizer).ok());
    char stepped = 0;
    gpus.PutWrite(optimizer, &stepped, 1, 1);
    gpus.RunDevices();
    EXPECT_EQ(stepped, 0);
    both.arrive_and_wait();
    gpus.Release();
    device.RunToIdle();
    gpus.RunDevices();
    EXPECT_EQ(stepped, 1);
    side.Check(c, rank, 2);
  });
}

TEST(NcclLanesTest, NoDeviceHasAContextThatNobodyChose) {
  FakeGpus gpus;
  RunCases(gpus, 2, DeviceCases(ReducingCases(ReduceOp::kSum, DType::kF32, 2)));
  EXPECT_THAT(gpus.devices_with_context(), ElementsAre(1, 2));
}

TEST(NcclLanesTest, WhatWasTakenIsGivenBack) {
  FakeGpus gpus;
  RunCases(gpus, 2, DeviceCases(ReducingCases(ReduceOp::kSum, DType::kF32, 2)));
  EXPECT_EQ(gpus.live_communicators(), 0);
  EXPECT_EQ(gpus.live_allocations(), 0);
  EXPECT_EQ(gpus.live_events(), 0);
  EXPECT_EQ(gpus.live_streams(), 2);  // the program's
  EXPECT_THAT(gpus.calls("ncclCommAbort"), IsEmpty());
  EXPECT_EQ(gpus.calls("ncclCommFinalize").size(), 4u);  // with the parents
}

TEST(NcclLanesTest, AnArenaThatNcclCannotGiveIsPlainMemory) {
  const Cases cases = DeviceCases(ReducingCases(ReduceOp::kSum, DType::kF32, 2));
  FakeGpus gpus;
  gpus.FailNext("ncclMemAlloc", static_cast<int>(nccl::Result::kUnhandledCudaError));
  RunCases(gpus, 2, cases);
  gpus.Forget();
  gpus.nccl().MemAlloc = nullptr;  // an older NCCL
  RunCases(gpus, 2, cases);
  EXPECT_EQ(gpus.live_allocations(), 0);
}

TEST(NcclLanesTest, SetsHaveTheirOwnCommunicators) {
  FakeGpus gpus;
  InprocWorld world(3);
  RankThreads::Run(3, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    const auto change = [&](bool adds) {
      auto work = std::make_shared<core::Work>();
      work->handle = std::make_shared<core::HandleState>();
      if (adds) {
        device.lanes().AddSet(5, RankRanges::Span(1, 2), work, core::Clock::now());
      } else {
        device.lanes().RemoveSet(5, work, core::Clock::now());
      }
      device.RunToIdle();
    };
    const RunCase c = OnDevice({.signature = {.shape = {40}}});
    RunSide all;
    device.Start({device.OnDevice(all.MakeItem(c, "all", rank, 3))});
    change(true);
    RunSide some;
    if (rank > 0) {
      // In a world of its own, so that what is expected is that of ranks 0 and 1.
      device.Start({device.OnDevice(some.MakeItem(c, "some", rank - 1, 2))}, 5,
                   std::make_shared<const RankRanges>(RankRanges::Span(1, 2)));
      device.RunToIdle();
    }
    change(false);
    EXPECT_TRUE(device.failure().ok()) << device.failure().ToString();
    all.Check(c, rank, 3);
    if (rank > 0) some.Check(c, rank - 1, 2);
  });
  EXPECT_EQ(gpus.calls("ncclGetUniqueId").size(), 2u);
  EXPECT_EQ(gpus.calls("ncclCommDestroy").size(), 10u);  // with the parents
  EXPECT_THAT(gpus.calls("ncclCommAbort"), IsEmpty());
}

// What a rank calls that all members must call alike, without its rank.
std::vector<std::string> CollectivesOf(const FakeGpus& gpus, int rank) {
  std::vector<std::string> found;
  const std::string by = " rank " + std::to_string(rank) + " ";
  for (const std::string& call : gpus.calls("nccl")) {
    const std::size_t at = call.find(by);
    const bool is_collective = call.find(" count ") != std::string::npos;
    if (at != std::string::npos && is_collective)
      found.push_back(call.substr(0, at) + call.substr(at + by.size() - 1));
  }
  return found;
}

// What the work reads is there when the stream comes to it, and something else before.
void MakeInStream(FakeGpus& gpus, cuda::StreamHandle stream, const Memory& input,
                  const core::Work& work) {
  void* const memory = const_cast<void*>(work.input);
  std::fill_n(static_cast<std::byte*>(memory), input.size(), std::byte{0xEE});
  gpus.PutCopy(stream, memory, input.data(), input.size());
}

TEST(NcclLanesTest, RandomProgramsLaunchTheSameSequenceOnAllRanks) {
  const int programs = tests::ScaledCount(20, 1000);
  const std::uint64_t first_seed = tests::TestSeed();
  for (std::uint64_t seed = first_seed; seed < first_seed + static_cast<std::uint64_t>(programs);
       ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(static_cast<unsigned>(seed));
    const int size = 2 + static_cast<int>(random() % 3);
    std::vector<Cases> batches(1 + random() % 4);
    batches.front().push_back(OnDevice({.signature = {.shape = {900}}}));
    for (Cases& cases : batches) {
      for (std::size_t i = 0; i < 1 + random() % 15; ++i) {
        const OpKind kinds[] = {OpKind::kAllReduce, OpKind::kReduce,        OpKind::kReduceScatter,
                                OpKind::kBroadcast, OpKind::kAllGatherInto, OpKind::kAllGather,
                                OpKind::kAllToAll};
        const DType types[] = {DType::kF32, DType::kI16, DType::kF64, DType::kU8, DType::kI64};
        const ReduceOp reductions[] = {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kAverage,
                                       ReduceOp::kProduct};
        RunCase c;
        c.signature.kind = kinds[random() % std::size(kinds)];
        c.signature.dtype = types[random() % std::size(types)];
        c.signature.shape = {static_cast<std::int64_t>(random() % 900)};
        c.seed = random();
        if (core::Reduces(c.signature.kind)) {
          c.signature.reduction = reductions[random() % std::size(reductions)];
          if (random() % 4 == 0) c.absent = static_cast<int>(random()) % size;
          if (c.absent < 0) c.absent = -1;
        }
        if (c.signature.kind == OpKind::kAllReduce && random() % 2 == 0) {
          c.in_parts = true;
          c.part_in_whole = random() % 2 == 0;
          c.in_place = random() % 2 == 0;
          if (random() % 2 == 0) {  // evenly
            c.signature.shape.front() *= size;
            c.parts.assign(static_cast<std::size_t>(size), c.signature.shape.front() / size);
          }
        }
        if (core::HasRoot(c.signature.kind)) {
          c.signature.root = static_cast<int>(random() % static_cast<unsigned>(size));
        }
        if (core::FirstDimensionVaries(c.signature.kind)) {
          c.signature.shape = {3};
          for (int r = 0; r < size; ++r) {
            c.rows.push_back(size * static_cast<std::int64_t>(random() % 5));
          }
        }
        cases.push_back(OnDevice(std::move(c)));
      }
    }
    FakeGpus gpus;
    gpus.AnswerInProgress(static_cast<int>(random() % 3));
    gpus.SetSeed(seed + 1);
    InprocWorld world(size);
    RankThreads::Run(size, [&](int rank) {
      DeviceRank device(gpus, world, rank);
      std::vector<std::deque<RunSide>> sides(batches.size());
      std::deque<Memory> inputs;
      for (std::size_t b = 0; b < batches.size(); ++b) {
        sides[b].resize(batches[b].size());
        std::vector<core::RunItem> items;
        for (std::size_t i = 0; i < batches[b].size(); ++i) {
          const std::string name = "t" + std::to_string(b) + "." + std::to_string(i);
          core::RunItem item = sides[b][i].MakeItem(batches[b][i], name, rank, size);
          if (item.work != nullptr && item.work->input != nullptr) {
            inputs.push_back(InputOf(batches[b][i], rank));
            MakeInStream(gpus, device.producer(), inputs.back(), *item.work);
          }
          items.push_back(device.OnDevice(std::move(item)));
        }
        device.Start(std::move(items));
      }
      device.RunToIdle();
      ASSERT_TRUE(device.failure().ok()) << device.failure().ToString();
      for (std::size_t b = 0; b < batches.size(); ++b) {
        for (std::size_t i = 0; i < batches[b].size(); ++i) {
          sides[b][i].Check(batches[b][i], rank, size);
        }
      }
    });
    const std::vector<std::string> first = CollectivesOf(gpus, 0);
    EXPECT_FALSE(first.empty());
    for (int rank = 1; rank < size; ++rank) EXPECT_EQ(CollectivesOf(gpus, rank), first);
  }
}

}  // namespace
}  // namespace sirtaki::ops
