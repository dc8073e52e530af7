// What the lanes do when something fails, with a backend that does what the test says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"
#include "ops/base/keep_forever.h"
#include "ops/host/host_lanes.h"
#include "tests/support/fake_backend.h"
#include "tests/support/run_cases.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::OpKind;
using core::RunBatch;
using core::RunItem;
using core::Signature;
using core::Status;
using core::StatusCode;
using tests::FakeBackend;

core::HandlePtr NewHandle() { return std::make_shared<core::HandleState>(); }

// Lanes of one rank over the fake, and what they called back.
struct Bench {
  explicit Bench(int ranks = 1) : size(ranks) {
    HostLanesOptions options{.rank = 0};
    options.medium = backend;
    options.on_failure = [this](const Status& why, const std::string& key) {
      was_idle = lanes->Idle();
      core::MutexLock lock(mutex);
      failures.emplace_back(why, key);
    };
    options.on_progress = [this] { ++progress; };
    lanes = std::make_unique<HostLanes>(std::move(options), *backend);
  }

  // A batch of one float all-reduce.
  core::HandlePtr Start(const std::string& name, std::int64_t count,
                        std::optional<DType> wire = std::nullopt,
                        core::SetNumber set = core::kWorldSet) {
    std::vector<float>& tensor = tensors.emplace_back(static_cast<std::size_t>(count), 1.0f);
    return StartOf(tensor.data(), nullptr, name, count, wire, set);
  }
  core::HandlePtr StartSmall(const std::string& name) { return Start(name, 1); }
  core::HandlePtr StartLarge(const std::string& name) { return Start(name, 1000); }
  // The work alone keeps `memory`.
  core::HandlePtr StartLargeOf(std::shared_ptr<std::vector<float>> memory) {
    float* const data = memory->data();
    const auto count = static_cast<std::int64_t>(memory->size());
    return StartOf(data, std::move(memory), "kept", count, std::nullopt, core::kWorldSet);
  }
  core::HandlePtr StartOf(float* tensor, std::shared_ptr<void> keep_alive, const std::string& name,
                          std::int64_t count, std::optional<DType> wire, core::SetNumber set) {
    auto work = std::make_shared<core::Work>();
    work->input = work->output = tensor;
    work->keep_alive = std::move(keep_alive);
    work->handle = NewHandle();
    core::HandlePtr handle = work->handle;
    RunItem item;
    item.key = core::Key::Named(set, name);
    item.signature = std::make_shared<const Signature>(Signature{.wire = wire, .shape = {count}});
    item.work = std::move(work);
    RunBatch batch = SmallBatch(size);
    batch.set = set;
    if (set != core::kWorldSet) {
      batch.members = std::make_shared<const core::RankRanges>(core::RankRanges{size});
    }
    batch.items.push_back(std::move(item));
    lanes->Start(std::move(batch), core::Clock::now());
    return handle;
  }

  static void WaitFor(const std::function<bool()>& condition) {
    const core::TimePoint limit = core::Clock::now() + std::chrono::seconds(30);
    while (!condition()) {
      ASSERT_LT(core::Clock::now(), limit);
      std::this_thread::yield();
    }
  }
  std::vector<std::pair<Status, std::string>> Failures() {
    core::MutexLock lock(mutex);
    return failures;
  }

  const int size;
  std::shared_ptr<FakeBackend> backend = std::make_shared<FakeBackend>();
  std::list<std::vector<float>> tensors;
  core::Mutex mutex;
  std::vector<std::pair<Status, std::string>> failures SIRTAKI_GUARDED_BY(mutex);
  std::atomic<int> progress{0};
  std::atomic<bool> was_idle{false};  // when a failure was told
  std::unique_ptr<HostLanes> lanes;
};

const Status kWhy(StatusCode::kBackend, "the wire broke");

TEST(HostLanesFailureTest, AFailureOnTheLargeLaneEndsEverythingOnce) {
  Bench bench;
  bench.backend->HoldSmall();
  const core::HandlePtr small = bench.StartSmall("small");
  bench.backend->Block(/*abort_frees=*/true);
  bench.backend->FailFrom(1, kWhy);
  const core::HandlePtr first = bench.StartLarge("first");
  const core::HandlePtr second = bench.StartLarge("second");
  EXPECT_TRUE(bench.lanes->NeedsStepping());
  Bench::WaitFor([&] { return bench.backend->inside(); });
  bench.backend->Free();
  Bench::WaitFor([&] { return small->done() && first->done() && second->done(); });
  for (const core::HandlePtr& handle : {small, first, second}) {
    EXPECT_EQ(handle->status().code(), StatusCode::kBackend);
    EXPECT_EQ(handle->status().message(), "all-reduce of \"first\" (large lane): the wire broke");
    EXPECT_EQ(handle->status().origin().rank, 0);
    EXPECT_EQ(handle->status().origin().tensor, "first");
  }
  EXPECT_FALSE(bench.was_idle);
  Bench::WaitFor([&] { return bench.lanes->Idle() && !bench.Failures().empty(); });
  EXPECT_FALSE(bench.lanes->NeedsStepping());
  EXPECT_FALSE(bench.lanes->Step());

  // Nothing starts after it.
  const int operations = bench.backend->operations();
  EXPECT_EQ(bench.StartSmall("late")->status(), first->status());
  EXPECT_EQ(bench.StartLarge("late")->status(), first->status());
  bench.lanes->Abandon({StatusCode::kAborted, "as well"});
  EXPECT_EQ(bench.backend->operations(), operations);
  ASSERT_EQ(bench.Failures().size(), 1u);
  EXPECT_EQ(bench.Failures()[0].first, first->status());
  EXPECT_EQ(bench.Failures()[0].second, "first");
  EXPECT_EQ(bench.backend->aborts(), std::vector<Status>{first->status()});
}

TEST(HostLanesFailureTest, AnotherRanksFaultKeepsItsText) {
  Bench bench(/*size=*/2);
  const Status theirs(StatusCode::kTimedOut, "\"slow\" did not finish", {1, "b", "slow"});
  bench.backend->FailFrom(0, theirs);
  const core::HandlePtr handle = bench.StartLarge("w");
  Bench::WaitFor([&] { return handle->done() && bench.lanes->Idle(); });
  EXPECT_EQ(handle->status(), theirs);
  ASSERT_EQ(bench.Failures().size(), 1u);
  EXPECT_EQ(bench.Failures()[0].first, theirs);
}

TEST(HostLanesFailureTest, AFailureInTheMiddleOfAGroupEndsIt) {
  Bench bench;
  bench.backend->FailFrom(2, kWhy);
  const core::HandlePtr handle = bench.StartLarge("w");  // 4000 bytes in windows of 256
  Bench::WaitFor([&] { return handle->done(); });
  EXPECT_EQ(handle->status().code(), StatusCode::kBackend);
  Bench::WaitFor([&] { return bench.lanes->Idle(); });
  EXPECT_EQ(bench.Failures().size(), 1u);
  EXPECT_FALSE(bench.was_idle);
  EXPECT_EQ(bench.backend->operations(), 3);
}

// The parts of two members are exchanged and then gathered.
TEST(HostLanesFailureTest, AFailureOfAnyStepEndsACompressedGroup) {
  for (const int step : {0, 1, 2, 3}) {
    Bench bench(/*size=*/2);
    bench.backend->FailFrom(step, kWhy);
    const core::HandlePtr handle = bench.Start("w", 1000, DType::kF16);
    Bench::WaitFor([&] { return handle->done() && bench.lanes->Idle(); });
    EXPECT_EQ(handle->status().code(), StatusCode::kBackend);
    EXPECT_EQ(bench.backend->operations(), step + 1);
  }
}

TEST(HostLanesFailureTest, AFailureOnTheSmallLaneIsReportedFromStep) {
  Bench bench;
  bench.backend->FailFrom(0, kWhy);
  const core::HandlePtr handle = bench.StartSmall("s");
  bench.lanes->Step();
  ASSERT_TRUE(handle->done());
  EXPECT_EQ(handle->status().code(), StatusCode::kBackend);
  ASSERT_EQ(bench.Failures().size(), 1u);
  EXPECT_EQ(bench.Failures()[0].second, "s");
}

TEST(HostLanesFailureTest, AbandonCompletesWhatWaitsAndWhatRuns) {
  Bench bench;
  bench.backend->HoldSmall();
  bench.backend->Block(/*abort_frees=*/true);
  const std::vector<core::HandlePtr> handles = {bench.StartSmall("a"), bench.StartLarge("b"),
                                                bench.StartLarge("c")};
  Bench::WaitFor([&] { return bench.backend->inside(); });
  const std::vector<core::RunningOperation> running = bench.lanes->Running();
  ASSERT_EQ(running.size(), 3u);
  EXPECT_EQ(running[0].what, "all-reduce of \"a\" (small lane)");
  EXPECT_EQ(running[1].what, "all-reduce of \"b\" (large lane)");
  EXPECT_EQ(running[2].what, "all-reduce of \"c\" (large lane)");
  EXPECT_FALSE(bench.lanes->Idle());

  const Status why(StatusCode::kPeerLost, "rank 3 is lost");
  bench.lanes->Abandon(why);
  for (const core::HandlePtr& handle : handles) {
    ASSERT_TRUE(handle->done());
    EXPECT_EQ(handle->status(), why);
  }
  Bench::WaitFor([&] { return bench.lanes->Idle(); });
  EXPECT_TRUE(bench.Failures().empty());
  // What a record of the failure has to tell.
  const std::vector<core::RunningOperation> then = bench.lanes->Running();
  ASSERT_EQ(then.size(), 3u);
  EXPECT_EQ(then[1].what, "all-reduce of \"b\" (large lane)");
  EXPECT_EQ(then[1].key, core::Key::Named(core::kWorldSet, "b"));
}

// What a thread that is stuck in the medium refers to stays, and the destructor does not wait for
// it.
TEST(HostLanesFailureTest, AStuckThreadIsLeftBehind) {
  auto bench = std::make_unique<Bench>();
  FakeBackend* const backend = bench->backend.get();
  const std::weak_ptr<FakeBackend> medium = bench->backend;
  backend->Block(/*abort_frees=*/false);
  auto memory = std::make_shared<std::vector<float>>(1000, 1.0f);
  const std::weak_ptr<std::vector<float>> watched = memory;
  const core::HandlePtr handle = bench->StartLargeOf(std::move(memory));
  Bench::WaitFor([&] { return backend->inside(); });

  bench->lanes->Abandon(kWhy);
  EXPECT_EQ(handle->status(), kWhy);
  EXPECT_FALSE(bench->lanes->Idle());
  bench.reset();  // returns, and nothing calls back afterwards
  EXPECT_FALSE(watched.expired());
  ASSERT_FALSE(medium.expired());
  backend->Free();
  Bench::WaitFor([&] { return !backend->inside(); });
  EXPECT_FALSE(watched.expired());
}

// The medium may still write to the memory of an operation that has failed, so the memory stays.
TEST(HostLanesFailureTest, WhatHasFailedOnTheLargeLaneKeepsItsMemory) {
  auto bench = std::make_unique<Bench>();
  bench->backend->FailFrom(0, kWhy);
  auto memory = std::make_shared<std::vector<float>>(1000, 1.0f);
  const std::weak_ptr<std::vector<float>> watched = memory;
  const core::HandlePtr handle = bench->StartLargeOf(std::move(memory));
  Bench::WaitFor([&] { return handle->done(); });
  EXPECT_EQ(handle->status().code(), kWhy.code());
  bench.reset();
  EXPECT_FALSE(watched.expired());
}

TEST(HostLanesFailureTest, TheDestructorAbandonsWhatIsUnfinished) {
  Bench bench;
  bench.backend->HoldSmall();
  bench.backend->Block(/*abort_frees=*/true);
  const core::HandlePtr small = bench.StartSmall("s");
  const core::HandlePtr large = bench.StartLarge("l");
  bench.lanes.reset();
  EXPECT_EQ(small->status().code(), StatusCode::kShutDown);
  EXPECT_EQ(large->status().code(), StatusCode::kShutDown);
}

// Memory of the run itself, as sizes that are exchanged, would go before the operation that writes to
// it.
TEST(HostLanesFailureTest, WhatIsUnfinishedIsWithdrawnBeforeItsMemoryGoes) {
  Bench bench;
  int asked = 0;
  bench.backend->let_go = [&] {
    EXPECT_EQ(bench.backend->held(), 0);
    ++asked;
    return true;
  };
  bench.backend->HoldSmall();
  bench.StartSmall("s");
  EXPECT_EQ(bench.backend->held(), 1);
  bench.lanes.reset();
  EXPECT_GT(asked, 0);
}

TEST(HostLanesFailureTest, ADestructorWithNothingToDoAbortsNobody) {
  const auto backend = std::make_shared<FakeBackend>();
  {
    Bench bench;
    EXPECT_TRUE(bench.lanes->Idle());
    bench.lanes.reset();
    EXPECT_TRUE(bench.backend->aborts().empty());
  }
}

TEST(HostLanesFailureTest, ProgressIsRungWhenTheLanesAreIdle) {
  Bench bench;
  for (int i = 1; i <= 20; ++i) {
    const core::HandlePtr handle = bench.StartLarge("w");
    Bench::WaitFor([&] { return bench.progress == i; });
    EXPECT_TRUE(handle->done());
    EXPECT_TRUE(bench.lanes->Idle());
  }
}

core::HandlePtr StartGather(Bench& bench,
                            std::function<void*(const std::vector<std::int64_t>&)> allocate,
                            std::int64_t rows) {
  auto work = std::make_shared<core::Work>();
  work->rows = rows;
  work->allocate_output = std::move(allocate);
  work->handle = NewHandle();
  RunItem item;
  item.key = core::Key::Named(core::kWorldSet, "gathered");
  item.signature =
      std::make_shared<const Signature>(Signature{.kind = OpKind::kAllGather, .shape = {2}});
  item.work = work;
  RunBatch batch = SmallBatch(bench.size);
  batch.items.push_back(std::move(item));
  bench.lanes->Start(std::move(batch), core::Clock::now());
  Bench::WaitFor([&] { return work->handle->done(); });
  return work->handle;
}

TEST(HostLanesFailureTest, AnAllocationThatThrowsIsAFailure) {
  Bench bench;
  const core::HandlePtr handle = StartGather(
      bench, [](const auto&) -> void* { throw std::runtime_error("the pool is empty"); }, 3);
  EXPECT_EQ(handle->status().message(),
            "all-gather of \"gathered\" (large lane): the pool is empty");
  Bench::WaitFor([&] { return bench.Failures().size() == 1; });
  EXPECT_EQ(bench.Failures()[0].second, "gathered");
}

TEST(HostLanesFailureTest, NoMemoryForAnOperationIsAFailure) {
  for (const bool large : {false, true}) {
    Bench bench;
    bench.backend->lacks_memory = true;
    const core::HandlePtr handle = large ? bench.StartLarge("w") : bench.StartSmall("w");
    bench.lanes->Step();
    Bench::WaitFor([&] { return handle->done(); });
    EXPECT_THAT(handle->status().message(), ::testing::HasSubstr("out of host memory"));
  }
}

TEST(HostLanesFailureTest, NoMemoryForAGatherIsAFailure) {
  Bench oom;
  EXPECT_THAT(StartGather(
                  oom, [](const auto&) -> void* { throw std::bad_alloc(); }, 3)
                  ->status()
                  .message(),
              ::testing::HasSubstr("out of host memory"));
  Bench null;
  EXPECT_THAT(StartGather(
                  null, [](const auto&) -> void* { return nullptr; }, 3)
                  ->status()
                  .message(),
              ::testing::HasSubstr("out of memory"));
}

TEST(HostLanesFailureTest, NonsenseRowsAreAFailure) {
  Bench bench;
  const auto none = [](const auto&) -> void* { return nullptr; };
  EXPECT_THAT(StartGather(bench, none, -5)->status().message(), ::testing::HasSubstr("-5 rows"));
  Bench huge;
  EXPECT_FALSE(StartGather(huge, none, std::int64_t{1} << 61)->status().ok());
}

TEST(HostLanesFailureTest, ASetWithoutThisRankIsAFailure) {
  Bench bench;
  const core::HandlePtr handle = bench.Start("w", 1, std::nullopt, /*set=*/9);
  EXPECT_THAT(handle->status().message(), ::testing::HasSubstr("set 9"));
  EXPECT_EQ(bench.Failures().size(), 1u);
}

}  // namespace
}  // namespace sirtaki::ops
