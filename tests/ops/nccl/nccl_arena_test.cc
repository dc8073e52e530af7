// Arenas on GPUs: when they are made, how NCCL comes to know them, what is reduced in them, and
// when their memory goes. The fakes end the process where ranks mix memory that NCCL knows with
// other.
#include "ops/nccl/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "fusion/arena_layout.h"
#include "tests/support/device_ranks.h"
#include "tests/support/rank_threads.h"

namespace sirtaki::ops {
namespace {

using core::Status;
using core::StatusCode;
using cuda::DeviceWork;
using nccl::ArenaPtr;
using nccl::ArenaRequest;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using tests::DeviceRank;
using tests::FakeGpus;
using tests::RankThreads;
using Floats = std::vector<float>;

constexpr std::int64_t kArenaBytes = 8192;
// One bucket, at the beginning of the arena.
const std::vector<std::int64_t> kCounts = {5, 8, 3};

Floats Of(std::int64_t count, float value) {
  return Floats(static_cast<std::size_t>(count), value);
}

DeviceWork& OnGpu(const core::RunItem& item) { return cuda::AsDeviceWork(*item.work); }

core::HandlePtr GiveHandle(core::RunItem& item) {
  item.work->handle = std::make_shared<core::HandleState>();
  return item.work->handle;
}

// The entry that makes an arena, the `number`-th.
core::RunItem ArenaItem(DeviceRank& rank, const std::shared_ptr<ArenaRequest>& request,
                        std::uint64_t number) {
  auto signature = std::make_shared<core::Signature>();
  signature->kind = core::OpKind::kMakeArena;
  signature->device = core::DeviceKind::kCuda;
  signature->layout = number;
  core::RunItem item{{.key = core::Key::Named(core::kWorldSet, "#arena " + std::to_string(number)),
                      .signature = std::move(signature)},
                     std::make_shared<core::Work>()};
  item = rank.OnDevice(std::move(item));
  OnGpu(item).arena_request = request;
  GiveHandle(item);
  return item;
}

ArenaPtr MakeArena(DeviceRank& rank, std::uint64_t number = 1) {
  const auto request = std::make_shared<ArenaRequest>();
  request->bytes = kArenaBytes;
  core::RunItem item = ArenaItem(rank, request, number);
  const core::HandlePtr handle = item.work->handle;
  rank.Start({std::move(item)});
  rank.RunToIdle();
  EXPECT_TRUE(handle->done() && handle->status().ok()) << rank.failure().ToString();
  return std::move(request->arena);
}

// A bucket of kCounts, of which a test says what is where. Its parts begin in their places.
class BucketSide {
 public:
  BucketSide(DeviceRank& rank, const ArenaPtr& arena) : inside_(kCounts.size()) {
    std::vector<std::int64_t> bytes;
    for (const std::int64_t count : kCounts) bytes.push_back(count * 4);
    const std::vector<std::int64_t> starts = fusion::PackedStarts(bytes);
    for (std::size_t i = 0; i < kCounts.size(); ++i) {
      auto signature = std::make_shared<core::Signature>();
      signature->reduction = core::ReduceOp::kAverage;
      signature->device = core::DeviceKind::kCuda;
      signature->shape = {kCounts[i]};
      core::RunItem item{{.signature = std::move(signature)}, std::make_shared<core::Work>()};
      item = rank.OnDevice(std::move(item));
      DeviceWork& work = OnGpu(item);
      work.arena = arena;
      work.place = arena != nullptr ? arena->begin() + starts[i] : nullptr;
      inside_[i] = Of(kCounts[i], -1);  // for who has no arena
      work.input = work.output = arena != nullptr ? Place(item) : inside_[i].data();
      items.push_back(std::move(item));
    }
  }

  static float* Place(const core::RunItem& item) {
    return reinterpret_cast<float*>(OnGpu(item).place);
  }
  void Write(float value) {
    for (std::size_t i = 0; i < items.size(); ++i) {
      auto* const input = static_cast<float*>(const_cast<void*>(items[i].work->input));
      std::fill_n(input, kCounts[i], value + static_cast<float>(i));
    }
  }
  Floats Result(std::size_t part) const {
    const auto* const output = static_cast<const float*>(results_[part]);
    return {output, output + kCounts[part]};
  }
  void Run(DeviceRank& rank) {
    for (const core::RunItem& item : items) {
      results_.push_back(item.work != nullptr ? item.work->output : nullptr);
    }
    rank.Start({Whole()});
    rank.RunToIdle();
    EXPECT_TRUE(rank.failure().ok()) << rank.failure().ToString();
  }

  std::vector<core::RunItem> items;  // of its parts

 private:
  core::RunItem Whole() const {
    auto signature = std::make_shared<core::Signature>();
    core::RunItem whole{{.key = core::Key::Bucket(core::kWorldSet, 1, 0)}};
    whole.silent = items.front().silent;
    if (items.front().work != nullptr) {
      whole.work = std::make_shared<core::Work>();
      GiveHandle(whole);
    }
    for (const core::RunItem& item : items) {
      signature->parts.push_back(item.signature);
      whole.absent.push_back(core::AllAbsent(item.absent));
      if (whole.work != nullptr) whole.work->parts.push_back(item.work);
    }
    whole.signature = std::move(signature);
    return whole;
  }

  std::vector<Floats> inside_;
  std::vector<void*> results_;
};

// Ranks 0 and 1 give 1 and 3, the parts that much more.
void RunAndCheck(DeviceRank& rank, int number, const ArenaPtr& arena) {
  BucketSide bucket(rank, arena);
  bucket.Write(static_cast<float>(1 + 2 * number));
  bucket.Run(rank);
  for (std::size_t i = 0; i < kCounts.size(); ++i) {
    EXPECT_EQ(bucket.Result(i), Of(kCounts[i], 2 + static_cast<float>(i)));
  }
}

class NcclArenaTest : public ::testing::Test {
 protected:
  void RunRanks(const std::function<void(DeviceRank& rank, int number)>& body,
                const std::function<void(int number, LanesOptions&)>& change = nullptr) {
    InprocWorld world(2);
    RankThreads::Run(2, [&](int number) {
      DeviceRank rank(gpus_, world, number, [&](LanesOptions& options) {
        if (change) change(number, options);
      });
      body(rank, number);
    });
  }

  // Who fails has the others abandon, as the engines do.
  struct EndOfAll {
    Status handle;
    Status failure;
  };
  static EndOfAll FailToMakeArena(DeviceRank& rank, std::atomic<bool>& failed) {
    const auto request = std::make_shared<ArenaRequest>();
    request->bytes = kArenaBytes;
    core::RunItem item = ArenaItem(rank, request, 1);
    const core::HandlePtr handle = item.work->handle;
    rank.Start({std::move(item)});
    while (!rank.lanes().Idle()) {
      rank.lanes().Step();
      if (failed) rank.lanes().Abandon({StatusCode::kPeerLost, "another rank has failed"});
      std::this_thread::yield();
    }
    while (!handle->done()) std::this_thread::yield();
    if (!rank.failure().ok()) failed = true;  // told before the handle is
    EXPECT_EQ(request->arena, nullptr);
    return {handle->status(), rank.failure()};
  }

  // The communicator and the staging memory are there.
  void Begin(DeviceRank& rank, int number) {
    RunAndCheck(rank, number, nullptr);
    both_.arrive_and_wait();
  }
  // By one of the two, while the other waits.
  void Once(int number, const std::function<void()>& call) {
    both_.arrive_and_wait();
    if (number == 0) call();
    both_.arrive_and_wait();
  }

  // The places of these calls among all calls, in the order in which they were made.
  std::vector<std::ptrdiff_t> PlacesOf(const std::string& beginning) const {
    std::vector<std::ptrdiff_t> places;
    const std::vector<std::string> all = gpus_.calls();
    for (auto call = all.begin(); call != all.end(); ++call) {
      if (call->starts_with(beginning)) places.push_back(call - all.begin());
    }
    return places;
  }

  FakeGpus gpus_;
  std::barrier<> both_{2};
};

TEST_F(NcclArenaTest, IsAWindowOnAllRanksBeforeABucketIsReducedInPlace) {
  RunRanks([&](DeviceRank& rank, int number) {
    ArenaPtr arena = MakeArena(rank);
    ASSERT_NE(arena, nullptr);
    EXPECT_EQ(arena->bytes(), kArenaBytes);
    Once(number, [&] { EXPECT_THAT(gpus_.calls("ncclCommWindowRegister"), SizeIs(2)); });
    Once(number, [&] { gpus_.Forget(); });
    RunAndCheck(rank, number, arena);
    Once(number, [&] {
      // One call a rank, of the bucket as it lies: 5 of 8 places, 8, and 3.
      EXPECT_THAT(gpus_.calls("ncclAllReduce"),
                  AllOf(SizeIs(2), Each(HasSubstr("count 19 type 7"))));
      EXPECT_THAT(gpus_.calls("path of ncclAllReduce"),
                  AllOf(SizeIs(2), Each(HasSubstr("symmetric"))));
      EXPECT_THAT(gpus_.calls("cuLaunchKernel"), SizeIs(2));  // divides
      EXPECT_THAT(gpus_.calls("ncclMemAlloc"), IsEmpty());
    });
  });
  EXPECT_THAT(gpus_.calls("ncclCommRegister"), IsEmpty());
  for (const char* rank : {" rank 0", " rank 1"}) {
    const auto gone = PlacesOf(std::string("ncclCommWindowDeregister") + rank);
    const auto end = PlacesOf(std::string("ncclCommFinalize") + rank);
    ASSERT_EQ(gone.size(), 1u);
    ASSERT_EQ(end.size(), 2u);  // and of the parent
    EXPECT_LT(gone.front(), end.front());
  }
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(NcclArenaTest, WithoutWindowsItIsRegisteredByEachRank) {
  gpus_.SetWindows(FakeGpus::Windows::kNone);
  RunRanks([&](DeviceRank& rank, int number) { RunAndCheck(rank, number, MakeArena(rank)); });
  EXPECT_THAT(gpus_.calls("ncclCommWindowRegister"), SizeIs(2));
  EXPECT_THAT(gpus_.calls("ncclCommWindowDeregister"), IsEmpty());
  EXPECT_THAT(gpus_.calls("ncclCommRegister"), SizeIs(2));
  EXPECT_THAT(gpus_.calls("ncclCommDeregister"), SizeIs(2));
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(NcclArenaTest, ALocalRegistrationInPlaceOfAWindowIsOneToNccl) {
  gpus_.SetWindows(FakeGpus::Windows::kLocal);
  RunRanks([&](DeviceRank& rank, int number) { RunAndCheck(rank, number, MakeArena(rank)); });
  EXPECT_THAT(gpus_.calls("path of ncclAllReduce"), AllOf(Not(IsEmpty()), Each(HasSubstr("ring"))));
  EXPECT_THAT(gpus_.calls("ncclCommRegister"), IsEmpty());
  EXPECT_THAT(gpus_.calls("ncclCommWindowDeregister"), SizeIs(2));
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

// A library of NCCL 2.29 has it.
nccl::Result IsNotAsked(nccl::CommHandle, void*, void**) { return nccl::Result::kInternalError; }

TEST_F(NcclArenaTest, ItsFormIsSaidAsFarAsNcclTells) {
  const std::vector<std::pair<decltype(nccl::Api::WinGetUserPtr), const char*>> forms = {
      {nullptr, "registered with NCCL, as a symmetric window where the machines can"},
      {IsNotAsked, "a symmetric window of NCCL"}};
  for (const auto& [says, text] : forms) {
    gpus_.nccl().WinGetUserPtr = says;
    std::vector<std::string> lines;
    core::SetLogSink([&](core::LogLevel, const std::string& line) {
      if (line.find("an arena of") != std::string::npos) lines.push_back(line);
    });
    core::ConfigureLog({.level = core::LogLevel::kInfo});
    RunRanks([&](DeviceRank& rank, int number) { RunAndCheck(rank, number, MakeArena(rank)); });
    core::ConfigureLog({});
    core::SetLogSink(nullptr);
    EXPECT_THAT(lines, AllOf(SizeIs(2), Each(EndsWith(std::string("GPU slot 0: ") + text))));
  }
  EXPECT_THAT(gpus_.calls("ncclCommRegister"), IsEmpty());
  EXPECT_THAT(gpus_.calls("ncclCommWindowDeregister"), SizeIs(4));
}

TEST_F(NcclArenaTest, APlainOneIsKeptFromNccl) {
  RunRanks(
      [&](DeviceRank& rank, int number) {
        const ArenaPtr arena = MakeArena(rank);
        ASSERT_NE(arena, nullptr);
        Once(number, [&] { gpus_.Forget(); });
        RunAndCheck(rank, number, arena);
        Once(number, [&] {
          EXPECT_THAT(gpus_.calls("cuLaunchKernel"), SizeIs(2));  // divides, and nothing unpacks
          EXPECT_THAT(gpus_.calls("path of ncclAllReduce"),
                      AllOf(SizeIs(2), Each(HasSubstr("nvls, copied"))));
        });
      },
      [](int, LanesOptions& options) { options.registers_arenas = false; });
  EXPECT_THAT(gpus_.calls("ncclCommWindowRegister"), IsEmpty());
  EXPECT_THAT(gpus_.calls("ncclCommRegister"), IsEmpty());
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(NcclArenaTest, AnOldNcclReducesInItAllTheSame) {
  gpus_.nccl().CommWindowRegister = nullptr;
  gpus_.nccl().CommRegister = nullptr;
  RunRanks([&](DeviceRank& rank, int number) {
    const ArenaPtr arena = MakeArena(rank);
    ASSERT_NE(arena, nullptr);
    Once(number, [&] { gpus_.Forget(); });
    RunAndCheck(rank, number, arena);
  });
  EXPECT_THAT(gpus_.calls("cuLaunchKernel"), SizeIs(2));  // divides
}

TEST_F(NcclArenaTest, MemoryThatIsNotNcclsIsNotRegistered) {
  gpus_.nccl().MemAlloc = nullptr;
  RunRanks([&](DeviceRank& rank, int number) {
    const ArenaPtr arena = MakeArena(rank);
    ASSERT_NE(arena, nullptr);
    EXPECT_FALSE(arena->of_nccl());
    RunAndCheck(rank, number, arena);
  });
  EXPECT_THAT(gpus_.calls("ncclCommWindowRegister"), IsEmpty());
  EXPECT_THAT(gpus_.calls("ncclCommRegister"), IsEmpty());
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(NcclArenaTest, MemoryThatNcclCannotGiveIsPlainAndLeavesNoErrorBehind) {
  RunRanks([&](DeviceRank& rank, int number) {
    Begin(rank, number);
    Once(number, [&] {
      gpus_.FailNext("ncclMemAlloc", static_cast<int>(nccl::Result::kUnhandledCudaError));
    });
    const ArenaPtr arena = MakeArena(rank);
    ASSERT_NE(arena, nullptr);
    RunAndCheck(rank, number, arena);
  });
  EXPECT_THAT(gpus_.calls("ncclCommWindowRegister"), IsEmpty());
}

TEST_F(NcclArenaTest, WhereOneRankHasNoMemoryNoneHasAnArena) {
  RunRanks([&](DeviceRank& rank, int number) {
    Begin(rank, number);
    Once(number, [&] { gpus_.SetFull(2); });  // rank 1's
    EXPECT_EQ(MakeArena(rank), nullptr);
    Once(number, [&] { gpus_.SetFull(2, false); });
    RunAndCheck(rank, number, nullptr);
    EXPECT_NE(MakeArena(rank, 2), nullptr);
  });
  // That of the second.
  EXPECT_THAT(gpus_.calls("ncclCommWindowRegister"), SizeIs(2));
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(NcclArenaTest, WhatOneRankCannotRegisterNoRankDoes) {
  gpus_.SetWindows(FakeGpus::Windows::kNone);
  RunRanks([&](DeviceRank& rank, int number) {
    Once(number,
         [&] { gpus_.FailNext("ncclCommRegister", static_cast<int>(nccl::Result::kSystemError)); });
    const ArenaPtr arena = MakeArena(rank);
    ASSERT_NE(arena, nullptr);
    Once(number, [&] { EXPECT_THAT(gpus_.calls("ncclCommDeregister"), SizeIs(1)); });
    RunAndCheck(rank, number, arena);
  });
  EXPECT_THAT(gpus_.calls("ncclCommDeregister"), SizeIs(1));
}

TEST_F(NcclArenaTest, CallsThatAreInProgressAreWaitedFor) {
  gpus_.AnswerInProgress(3);
  RunRanks([&](DeviceRank& rank, int number) { RunAndCheck(rank, number, MakeArena(rank)); });
  EXPECT_THAT(gpus_.calls("ncclCommWindowDeregister"), SizeIs(2));
}

TEST_F(NcclArenaTest, WhatLiesElsewhereIsBroughtInAndTakenBack) {
  RunRanks([&](DeviceRank& rank, int number) {
    const ArenaPtr arena = MakeArena(rank);
    Once(number, [&] { gpus_.Forget(); });
    BucketSide bucket(rank, arena);
    Floats fresh = Of(kCounts[0], 0);  // read there, and left in the arena
    Floats own = Of(kCounts[2], 0);    // of somebody who keeps it
    if (number == 0) {
      bucket.items[0].work->input = fresh.data();
      bucket.items[2].work->input = bucket.items[2].work->output = own.data();
    } else {
      bucket.items[1].work->request.absent = {true};
    }
    bucket.Write(static_cast<float>(1 + 2 * number));
    float* const third = BucketSide::Place(bucket.items[2]);
    bucket.Run(rank);
    EXPECT_EQ(bucket.Result(0), Of(kCounts[0], 2));
    EXPECT_EQ(bucket.Result(1), Of(kCounts[1], 1));
    EXPECT_EQ(bucket.Result(2), Of(kCounts[2], 4));
    EXPECT_EQ(Floats(third, third + kCounts[2]), Of(kCounts[2], 4));
    if (number == 0) {
      EXPECT_EQ(fresh, Of(kCounts[0], 1));
    }
    // In, and back, on one; the place of what is absent on the other.
    Once(number, [&] { EXPECT_THAT(gpus_.calls("cuLaunchKernel"), SizeIs(3)); });
  });
}

TEST_F(NcclArenaTest, ScalesInPlace) {
  RunRanks([&](DeviceRank& rank, int number) {
    BucketSide bucket(rank, MakeArena(rank));
    for (core::RunItem& item : bucket.items) {
      auto scaled = std::make_shared<core::Signature>(*item.signature);
      scaled->prescale = 0.5;
      scaled->postscale = 3.0;
      item.signature = std::move(scaled);
    }
    bucket.Write(static_cast<float>(1 + 2 * number));
    bucket.Run(rank);
    EXPECT_EQ(bucket.Result(0), Of(kCounts[0], 3));
    EXPECT_EQ(bucket.Result(2), Of(kCounts[2], 6));
  });
}

TEST_F(NcclArenaTest, AHoleIsLeftAsItIs) {
  RunRanks([&](DeviceRank& rank, int number) {
    const ArenaPtr arena = MakeArena(rank);
    BucketSide bucket(rank, arena);
    bucket.Write(static_cast<float>(1 + 2 * number));
    bucket.items[1].absent = {true};
    bucket.Run(rank);
    EXPECT_EQ(bucket.Result(0), Of(kCounts[0], 2));
    EXPECT_EQ(bucket.Result(1), Of(kCounts[1], static_cast<float>(2 + 2 * number)));
    EXPECT_EQ(bucket.Result(2), Of(kCounts[2], 4));
  });
}

TEST_F(NcclArenaTest, ARankThatHasJoinedSparesTheOthersTheirs) {
  RunRanks([&](DeviceRank& rank, int number) {
    const ArenaPtr arena = MakeArena(rank);
    BucketSide bucket(rank, arena);
    bucket.Write(4);
    for (core::RunItem& item : bucket.items) {
      item.silent = core::RankRanges::Span(1, 1);
      if (number == 1) item.work = nullptr;
    }
    bucket.Run(rank);
    if (number == 0) {
      EXPECT_EQ(bucket.Result(1), Of(kCounts[1], 2.5));
    }
    // Nor is there one for the others.
    const auto request = std::make_shared<ArenaRequest>();
    request->bytes = kArenaBytes;
    core::RunItem item = ArenaItem(rank, request, 2);
    item.silent = core::RankRanges::Span(1, 1);
    if (number == 1) item.work = nullptr;
    rank.Start({std::move(item)});
    rank.RunToIdle();
    EXPECT_EQ(request->arena, nullptr);
  });
  EXPECT_THAT(gpus_.calls("ncclCommWindowRegister"), SizeIs(2));
}

TEST_F(NcclArenaTest, ARankThatHasJoinedSparesTheOthersTheirsOfOneTensor) {
  RunRanks([&](DeviceRank& rank, int number) {
    const ArenaPtr arena = MakeArena(rank);
    BucketSide bucket(rank, arena);
    bucket.Write(4);
    core::RunItem item = std::move(bucket.items[1]);
    item.key = core::Key::Named(core::kWorldSet, "w");
    item.silent = core::RankRanges::Span(1, 1);
    const void* const output = item.work->output;
    if (number == 1) item.work = nullptr;
    rank.Start({std::move(item)});
    rank.RunToIdle();
    EXPECT_TRUE(rank.failure().ok()) << rank.failure().ToString();
    if (number == 0) {
      EXPECT_EQ(*static_cast<const float*>(output), 2.5);
    }
  });
}

TEST_F(NcclArenaTest, IsGivenUpWhenNoRankHasAUseForIt) {
  RunRanks([&](DeviceRank& rank, int number) {
    ArenaPtr first = MakeArena(rank);
    RunAndCheck(rank, number, first);
    if (number == 0) first->Retire();
    const ArenaPtr second = MakeArena(rank, 2);
    Once(number, [&] { EXPECT_THAT(gpus_.calls("ncclCommWindowDeregister"), IsEmpty()); });
    first->Retire();
    const ArenaPtr third = MakeArena(rank, 3);
    Once(number, [&] { EXPECT_THAT(gpus_.calls("ncclCommWindowDeregister"), SizeIs(2)); });
    first.reset();
    RunAndCheck(rank, number, second);
    RunAndCheck(rank, number, third);
  });
  EXPECT_THAT(gpus_.calls("ncclCommWindowDeregister"), SizeIs(6));
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(NcclArenaTest, ItsMemoryStaysUntilTheReadersAreThrough) {
  std::atomic<bool> open{false};
  RunRanks([&](DeviceRank& rank, int number) {
    ArenaPtr arena = MakeArena(rank);
    RunAndCheck(rank, number, arena);
    const auto stream = gpus_.MakeStream();
    arena->NoteReader(stream);
    gpus_.PutGate(stream, open);
    arena->Retire();
    EXPECT_NE(MakeArena(rank, 2), nullptr);  // which lets the lane go of it
    Once(number, [&] { gpus_.Forget(); });
    arena.reset();
    RunAndCheck(rank, number, nullptr);
    Once(number, [&] { EXPECT_THAT(gpus_.calls("ncclMemFree"), IsEmpty()); });
    open = true;
  });
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(NcclArenaTest, OutlivesTheLanesWithWhoeverHasIt) {
  std::vector<ArenaPtr> kept(2);
  RunRanks([&](DeviceRank& rank, int number) {
    ArenaPtr& arena = kept[static_cast<std::size_t>(number)];
    arena = MakeArena(rank);
    RunAndCheck(rank, number, arena);
    arena->NoteReader(rank.producer());
  });
  EXPECT_EQ(gpus_.live_allocations(), 2);
  EXPECT_EQ(*reinterpret_cast<const float*>(kept[0]->begin()), 2.0F);
  kept.clear();
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(NcclArenaTest, AReaderThatIsNoMoreLeavesTheMemoryAndNoErrorBehind) {
  std::vector<ArenaPtr> kept(2);
  RunRanks([&](DeviceRank& rank, int number) {
    ArenaPtr& arena = kept[static_cast<std::size_t>(number)];
    arena = MakeArena(rank);
    arena->NoteReader(rank.producer());
  });
  gpus_.FailNext("cudaStreamIsCapturing", 400);
  kept.clear();
  EXPECT_EQ(gpus_.live_allocations(), 1);
  EXPECT_EQ(gpus_.cuda().GetLastError(), cuda::Error::kSuccess);
}

TEST_F(NcclArenaTest, AFailureWhileItIsRegisteredEndsAllRanks) {
  std::atomic<bool> failed{false};
  std::atomic<int> causes{0};
  RunRanks([&](DeviceRank& rank, int number) {
    Begin(rank, number);
    Once(number, [&] {
      gpus_.FailNext("ncclCommWindowRegister", static_cast<int>(nccl::Result::kSystemError));
    });
    const EndOfAll end = FailToMakeArena(rank, failed);
    EXPECT_FALSE(end.handle.ok());
    if (end.failure.message().find("ncclCommWindowRegister: a fake") != std::string::npos) {
      EXPECT_THAT(end.failure.message(), HasSubstr("gradient_arena=plain"));
      ++causes;
    }
    both_.arrive_and_wait();
  });
  EXPECT_TRUE(failed);
  EXPECT_EQ(causes, 1);
  EXPECT_THAT(gpus_.calls("ncclCommAbort"), SizeIs(4));  // with the parents
  EXPECT_THAT(gpus_.calls("ncclCommFinalize"), IsEmpty());
  // The staging memory is; nobody knows what is still written to the arenas.
  EXPECT_THAT(gpus_.calls("ncclMemFree"), SizeIs(2));
  EXPECT_EQ(gpus_.live_allocations(), 2);
}

TEST_F(NcclArenaTest, ARankThatDoesNotComeToTheWindowIsSaidAtTheLimit) {
  std::atomic<bool> failed{false};
  RunRanks(
      [&](DeviceRank& rank, int number) {
        const EndOfAll end = FailToMakeArena(rank, failed);
        EXPECT_FALSE(end.handle.ok());
        if (number == 0) {
          EXPECT_THAT(end.failure.ToString(),
                      AllOf(HasSubstr("ncclCommWindowRegister: still in progress after 5 s"),
                            Not(HasSubstr("gradient_arena"))));
        }
        both_.arrive_and_wait();
      },
      [&](int number, LanesOptions& options) {
        options.nccl_limit = std::chrono::seconds(5);  // the communicator is made in it, too
        if (number == 0) return;
        options.load_nccl = [this](nccl::Library* library) {
          library->api = gpus_.nccl();
          library->version = nccl::kDeclaredVersion;
          library->api.CommWindowRegister = [](nccl::CommHandle, void*, std::size_t, void**, int) {
            return nccl::Result::kSuccess;
          };
          return Status::Ok();
        };
      });
}

}  // namespace
}  // namespace sirtaki::ops
