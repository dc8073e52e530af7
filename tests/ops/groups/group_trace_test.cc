// What the recorder and the metrics of a rank have of the groups in its lanes.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/trace/observer.h"
#include "ops/host/host_lanes.h"
#include "ops/inproc/inproc_backend.h"
#include "tests/support/rank_threads.h"
#include "tests/support/run_cases.h"

namespace sirtaki::ops {
namespace {

using core::OpKind;
using core::trace::Event;
using core::trace::EventKind;
using core::trace::Metric;
using core::trace::Track;
using tests::RankThreads;

constexpr int kSize = 2;
constexpr std::int64_t kChunk = 1024;  // bytes

struct Tensor {
  Tensor(OpKind kind, std::int64_t count, const std::string& name)
      : values(static_cast<std::size_t>(count), 1.0F) {
    auto signature = std::make_shared<core::Signature>();
    signature->kind = kind;
    signature->shape = {count};
    auto work = std::make_shared<core::Work>();
    work->input = values.data();
    work->output = values.data();
    work->handle = std::make_shared<core::HandleState>();
    item = {{.key = core::Key::Named(core::kWorldSet, name), .signature = std::move(signature)},
            std::move(work)};
  }
  std::vector<float> values;
  core::RunItem item;
};

struct Lanes {
  Lanes(InprocWorld& world, int rank, core::trace::ObserverPtr observer)
      : backend(world.Connect(rank)) {
    HostLanesOptions options;
    options.rank = rank;
    options.observer = std::move(observer);
    lanes = std::make_unique<HostLanes>(std::move(options), *backend);
  }
  static core::RunBatch NewBatch() {
    core::RunBatch batch = SmallBatch(kSize);
    batch.limits = {.small_bytes = 256, .chunk_bytes = kChunk};
    return batch;
  }
  void Run(const std::vector<Tensor*>& tensors) {
    core::RunBatch batch = NewBatch();
    for (Tensor* tensor : tensors) batch.items.push_back(tensor->item);
    lanes->Start(std::move(batch), core::Clock::now());
    const core::TimePoint limit = core::Clock::now() + std::chrono::seconds(30);
    while (!lanes->Idle()) {
      lanes->Step();
      ASSERT_LT(core::Clock::now(), limit);
      std::this_thread::yield();
    }
    for (Tensor* tensor : tensors) EXPECT_TRUE(tensor->item.work->handle->status().ok());
  }
  std::unique_ptr<Backend> backend;
  std::unique_ptr<HostLanes> lanes;
};

std::vector<Event> EventsOf(const core::trace::ObserverPtr& observer) {
  std::vector<Event> events;
  std::uint64_t lost = 0;
  observer->recorder.Read(0, true, &events, &lost);
  return events;
}

std::string Kinds(const std::vector<Event>& events) {
  std::string kinds;
  for (const Event& event : events) {
    kinds += (kinds.empty() ? "" : " ") + std::string(EventKindName(event.kind));
  }
  return kinds;
}

// Each begins where what came before it has ended, all within the group's time.
void ExpectInOrder(const std::vector<Event>& events) {
  core::TimePoint last = events.front().begin;
  for (const Event& event : events) {
    EXPECT_LE(event.begin, event.end);
    if (event.kind == EventKind::kFinish) {
      EXPECT_GE(event.end, last);
      continue;
    }
    EXPECT_GE(event.begin, last) << EventKindName(event.kind);
    last = event.end;
  }
}

TEST(GroupTraceTest, AGroupIsQueuedBegunAndFinished) {
  InprocWorld world(kSize);
  RankThreads::Run(kSize, [&](int rank) {
    const auto observer = std::make_shared<core::trace::Observer>();
    Lanes lanes(world, rank, observer);
    Tensor a(OpKind::kAllReduce, 16, "a");
    Tensor b(OpKind::kAllReduce, 8, "b");
    lanes.Run({&a, &b});
    const std::vector<Event> events = EventsOf(observer);
    ASSERT_EQ(Kinds(events), "queue begin finish");
    ExpectInOrder(events);
    for (const Event& event : events) {
      EXPECT_EQ(event.text(), "all-reduce of 2 tensors from \"a\" (small lane)");
      EXPECT_EQ(event.track, Track::kSmallLane);
      EXPECT_EQ(event.number, 1U);
      EXPECT_EQ(event.count, 2U);
      EXPECT_EQ(event.bytes, 24 * 4);
    }
    const core::trace::Metrics metrics = observer->metrics.Read();
    EXPECT_EQ(metrics.Count(Metric::kGroups), 1);
    EXPECT_EQ(metrics.Count(Metric::kTensors), 2);
    EXPECT_EQ(metrics.Count(Metric::kBytes), 24 * 4);
    EXPECT_EQ(metrics.kind_groups[static_cast<std::size_t>(OpKind::kAllReduce)], 1);
    EXPECT_GT(metrics.Count(Metric::kPackTime), 0);
    EXPECT_GT(metrics.Count(Metric::kMoveTime), 0);
    EXPECT_GT(metrics.Count(Metric::kUnpackTime), 0);
    EXPECT_GT(metrics.Count(Metric::kQueueTime), 0);
    EXPECT_GE(metrics.Count(Metric::kTransferTime), metrics.Count(Metric::kPackTime) +
                                                        metrics.Count(Metric::kMoveTime) +
                                                        metrics.Count(Metric::kUnpackTime));
    EXPECT_EQ(observer->metrics.Read().Count(Metric::kTransferTime),
              metrics.Count(Metric::kTransferTime));  // it is over
    EXPECT_EQ(metrics.Count(Metric::kDeviceGroups), 0);
  });
}

// The call of the backend returns when all is done: so the time of moving is that from the first
// rank's begin to the last one's.
TEST(GroupTraceTest, DetailHasThePhasesOfEachWindow) {
  // Ranks of two hosts, between which a window is no longer than it was asked to be.
  InprocWorld world(kSize, {.host_of_rank = {0, 1}});
  std::vector<std::vector<Event>> of(kSize);
  RankThreads::Run(kSize, [&](int rank) {
    const auto observer = std::make_shared<core::trace::Observer>();
    observer->detail = true;
    Lanes lanes(world, rank, observer);
    Tensor big(OpKind::kAllReduce, 2 * kChunk / 4, "big");
    lanes.Run({&big});
    of[static_cast<std::size_t>(rank)] = EventsOf(observer);
  });
  for (const std::vector<Event>& events : of) {
    ASSERT_EQ(Kinds(events), "queue begin pack move unpack pack move unpack finish");
    ExpectInOrder(events);
    for (const Event& event : events) {
      EXPECT_EQ(event.track, Track::kLargeLane);
      EXPECT_EQ(event.text() == "in-process", event.kind == EventKind::kMove);
    }
  }
  // Neither is through before the other has begun.
  EXPECT_GE(of[0][3].end, of[1][3].begin);
  EXPECT_GE(of[1][3].end, of[0][3].begin);
}

TEST(GroupTraceTest, GroupsAreNumberedInTheirOrder) {
  InprocWorld world(kSize);
  RankThreads::Run(kSize, [&](int rank) {
    const auto observer = std::make_shared<core::trace::Observer>();
    Lanes lanes(world, rank, observer);
    for (int i = 0; i < 3; ++i) {
      Tensor tensor(OpKind::kBroadcast, 8, "t" + std::to_string(i));
      auto signature = std::make_shared<core::Signature>(*tensor.item.signature);
      signature->root = 1;
      tensor.item.signature = signature;
      lanes.Run({&tensor});
    }
    std::vector<std::uint64_t> finished;
    for (const Event& event : EventsOf(observer)) {
      if (event.kind == EventKind::kFinish) finished.push_back(event.number);
    }
    EXPECT_EQ(finished, (std::vector<std::uint64_t>{1, 2, 3}));
    EXPECT_EQ(observer->metrics.Read().kind_groups[static_cast<std::size_t>(OpKind::kBroadcast)],
              3);
  });
}

// What a flight record has of it: that it began, and not that it ended.
TEST(GroupTraceTest, AGroupThatFailsIsNotFinished) {
  InprocWorld world(kSize);
  const auto observer = std::make_shared<core::trace::Observer>();
  {
    Lanes lanes(world, 0, observer);  // whose peer never comes
    Tensor tensor(OpKind::kAllReduce, 16, "w");
    core::RunBatch batch = Lanes::NewBatch();
    batch.items.push_back(tensor.item);
    lanes.lanes->Start(std::move(batch), core::Clock::now());
    lanes.lanes->Abandon({core::StatusCode::kAborted, "enough"});
    EXPECT_FALSE(tensor.item.work->handle->status().ok());
  }
  EXPECT_EQ(Kinds(EventsOf(observer)), "queue begin");
  EXPECT_EQ(observer->metrics.Read().Count(Metric::kGroups), 0);
}

}  // namespace
}  // namespace sirtaki::ops
