// Process sets that come and go in the order of the large lane.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/host/host_lanes.h"
#include "ops/inproc/inproc_backend.h"
#include "ops/inproc/inproc_port.h"
#include "ops/wire/wire_backend.h"
#include "tests/support/fake_backend.h"
#include "tests/support/rank_threads.h"
#include "tests/support/run_cases.h"
#include "tests/support/test_scale.h"

namespace sirtaki::ops {
namespace {

using core::RankRanges;
using core::Signature;
using core::Status;
using core::StatusCode;
using tests::FakeBackend;
using tests::RankThreads;

core::WorkPtr NewWork() {
  auto work = std::make_shared<core::Work>();
  work->handle = std::make_shared<core::HandleState>();
  return work;
}

// Lanes of one rank. Tensors are float32 sums in place.
class Rank {
 public:
  Rank(int rank, int size, std::shared_ptr<Backend> backend) : backend_(std::move(backend)) {
    HostLanesOptions options{.rank = rank};
    sets[core::kWorldSet] = RankRanges::Span(0, size - 1);
    options.on_failure = [this](const Status&, const std::string&) { ++failures; };
    lanes = std::make_unique<HostLanes>(std::move(options), *backend_);
  }

  core::HandlePtr AddSet(core::SetNumber set, const RankRanges& members) {
    const core::WorkPtr work = NewWork();
    sets[set] = members;
    lanes->AddSet(set, members, work, core::Clock::now());
    return work->handle;
  }
  core::HandlePtr RemoveSet(core::SetNumber set) {
    const core::WorkPtr work = NewWork();
    lanes->RemoveSet(set, work, core::Clock::now());
    return work->handle;
  }

  core::HandlePtr Sum(core::SetNumber set, std::int64_t count, float value) {
    return Start(set, Signature{.shape = {count}}, count, value);
  }
  core::HandlePtr Broadcast(int root, float value) {
    return Start(core::kWorldSet,
                 Signature{.kind = core::OpKind::kBroadcast, .root = root, .shape = {1}}, 1, value);
  }

  core::HandlePtr Start(core::SetNumber set, Signature signature, std::int64_t count, float value) {
    std::vector<float>& tensor = tensors.emplace_back(static_cast<std::size_t>(count), value);
    const core::WorkPtr work = NewWork();
    work->input = work->output = tensor.data();
    core::RunItem item;
    item.key = core::Key::Named(set, "t");
    item.signature = std::make_shared<const Signature>(std::move(signature));
    item.work = work;
    core::RunBatch batch = SmallBatch(1);
    batch.set = set;
    batch.limits.chunk_bytes = core::Limits().chunk_bytes;
    batch.members = std::make_shared<const RankRanges>(sets[set]);
    batch.items.push_back(std::move(item));
    lanes->Start(std::move(batch), core::Clock::now());
    return work->handle;
  }
  core::HandlePtr SmallSum(core::SetNumber set, float value) { return Sum(set, 1, value); }
  core::HandlePtr LargeSum(core::SetNumber set, float value) { return Sum(set, 1000, value); }

  void Drive(const std::function<bool()>& condition) {
    const core::TimePoint limit = core::Clock::now() + std::chrono::seconds(30);
    while (!condition()) {
      ASSERT_LT(core::Clock::now(), limit);
      if (!lanes->Step()) std::this_thread::yield();
    }
  }
  Status Finish(const core::HandlePtr& handle) {
    Drive([&] { return handle->done(); });
    return handle->status();
  }

 private:
  const std::shared_ptr<Backend> backend_;

 public:
  std::map<core::SetNumber, RankRanges> sets;
  std::list<std::vector<float>> tensors;
  std::atomic<int> failures{0};
  std::unique_ptr<HostLanes> lanes;
};

class HostLanesSetsTest : public ::testing::Test {
 protected:
  static void RunRanks(int size, const std::function<void(Rank&, int)>& body) {
    InprocWorld world(size);
    RankThreads::Run(size, [&](int rank) {
      Rank self(rank, size, world.Connect(rank));
      body(self, rank);
      EXPECT_EQ(self.failures, 0);
    });
  }
};

TEST_F(HostLanesSetsTest, ASetIsThereWhenItsHandleIsDone) {
  RunRanks(3, [](Rank& self, int rank) {
    const core::HandlePtr added = self.AddSet(4, {0, 2});
    EXPECT_TRUE(self.Finish(added).ok());
    EXPECT_EQ(added->value(), 4);
    if (rank != 1) {
      EXPECT_TRUE(self.Finish(self.SmallSum(4, 1)).ok());
      EXPECT_EQ(self.tensors.back().front(), 2);
      EXPECT_TRUE(self.Finish(self.LargeSum(4, 2)).ok());
      EXPECT_EQ(self.tensors.back().front(), 4);
    }
    const core::HandlePtr removed = self.RemoveSet(4);
    EXPECT_TRUE(self.Finish(removed).ok());
    EXPECT_EQ(removed->value(), 4);
    self.Drive([&] { return self.lanes->Idle(); });
    EXPECT_TRUE(self.lanes->Running().empty());
  });
}

// Sends at once, whether anybody receives or not, as MPI does with little.
class EagerPort final : public wire::Port {
 public:
  explicit EagerPort(std::unique_ptr<wire::Port> port) : port_(std::move(port)) {}

  std::string_view name() const override { return port_->name(); }
  int rank() const override { return port_->rank(); }
  int size() const override { return port_->size(); }
  std::int64_t tags() const override { return port_->tags(); }
  void Abort(const Status& why) override { port_->Abort(why); }
  std::unique_ptr<Completion> Post(wire::Envelope envelope, std::span<const wire::Receive> receives,
                                   std::span<const wire::Send> sends) override {
    for (wire::Send send : sends) {
      const auto* const bytes = static_cast<const std::byte*>(send.memory);
      const auto& copy = copies_.emplace_back(bytes, bytes + send.bytes);
      send.memory = copy.data();
      sent_.push_back(port_->Post(envelope, {}, {&send, 1}));
    }
    return port_->Post(envelope, receives, {});
  }

 private:
  const std::unique_ptr<wire::Port> port_;
  std::list<std::vector<std::byte>> copies_;
  std::vector<std::unique_ptr<Completion>> sent_;
};

struct Wired {
  Wired(const InprocPorts& ports, int rank) : port(ports.Connect(rank)), backend(port, {}) {}
  EagerPort port;
  wire::WireBackend backend;
};

// Rank 3 gives to all as root, and waits in the oldest broadcast for rank 1, which comes late. What
// it has given since must not be taken for what it will pass on.
TEST_F(HostLanesSetsTest, SmallWorkRunsAheadNoFurtherThanItsTagsGo) {
  constexpr int kLater = 80;
  const InprocPorts ports(4);
  std::atomic<int> looks{0};  // of rank 3, since it could go no further
  std::vector<std::shared_ptr<Wired>> of_rank;
  for (int rank = 0; rank < 4; ++rank) of_rank.push_back(std::make_shared<Wired>(ports, rank));
  RankThreads::Run(4, [&](int rank) {
    const auto& wired = of_rank[static_cast<std::size_t>(rank)];
    Rank self(rank, 4, {wired, &wired->backend});
    if (rank == 1) {
      const core::TimePoint limit = core::Clock::now() + std::chrono::seconds(30);
      while (looks < 100 && core::Clock::now() < limit) std::this_thread::yield();
    }
    std::vector<core::HandlePtr> handles{self.Broadcast(1, rank == 1 ? 1000.0F : 0)};
    for (int i = 0; i < kLater; ++i) {
      handles.push_back(self.Broadcast(3, rank == 3 ? static_cast<float>(i) : -1));
    }
    self.Drive([&] {
      if (rank == 3 && handles[Backend::kSmallAhead - 1]->done()) ++looks;
      return self.lanes->Idle();
    });
    auto tensor = self.tensors.begin();
    EXPECT_EQ(tensor->front(), 1000);
    for (int i = 0; i < kLater; ++i) EXPECT_EQ((++tensor)->front(), static_cast<float>(i));
    EXPECT_EQ(self.failures, 0);
  });
}

// Sets of random members, several at once, which go while their last work is still queued.
TEST_F(HostLanesSetsTest, SetsComeAndGoUnderLoad) {
  const std::uint64_t seed = tests::TestSeed();
  const int rounds = tests::ScaledCount(60, 1000);
  RunRanks(4, [&](Rank& self, int rank) {
    std::mt19937_64 random(seed);
    std::map<core::SetNumber, RankRanges> sets;
    std::vector<std::pair<core::HandlePtr, float>> sums;
    std::vector<const std::vector<float>*> results;
    for (core::SetNumber set = 1; set <= static_cast<core::SetNumber>(rounds); ++set) {
      RankRanges members;
      for (int r = 0; r < 4; ++r) {
        if (random() % 2 == 0) members.Add(r);
      }
      if (members.empty()) members.Add(static_cast<int>(random() % 4));
      ASSERT_TRUE(self.Finish(self.AddSet(set, members)).ok());
      sets.emplace(set, members);
      for (const auto& [number, ranks] : sets) {
        const bool small = random() % 2 == 0;
        if (!ranks.Contains(rank)) continue;
        const auto expected =
            static_cast<float>(number * static_cast<std::uint64_t>(ranks.Count()));
        const auto value = static_cast<float>(number);
        sums.emplace_back(small ? self.SmallSum(number, value) : self.LargeSum(number, value),
                          expected);
        results.push_back(&self.tensors.back());
      }
      if (sets.size() < 4) continue;
      const auto gone = std::next(sets.begin(), static_cast<std::ptrdiff_t>(random() % 4));
      const core::HandlePtr removed = self.RemoveSet(gone->first);
      if (random() % 2 == 0) {
        ASSERT_TRUE(self.Finish(removed).ok());
      }
      sets.erase(gone);
    }
    self.Drive([&] { return self.lanes->Idle(); });
    for (std::size_t i = 0; i < sums.size(); ++i) {
      ASSERT_TRUE(sums[i].first->done());
      EXPECT_TRUE(sums[i].first->status().ok()) << sums[i].first->status().ToString();
      EXPECT_EQ(results[i]->front(), sums[i].second);
      EXPECT_EQ(results[i]->back(), sums[i].second);
    }
  });
}

// What follows on the large lane waits with it; other sets' small work does not hold it up.
TEST_F(HostLanesSetsTest, ASetGoesWhenItsSmallWorkIsDone) {
  const auto backend = std::make_shared<FakeBackend>();
  Rank self(0, 1, backend);
  EXPECT_TRUE(self.Finish(self.AddSet(1, {0})).ok());
  EXPECT_TRUE(self.Finish(self.AddSet(2, {0})).ok());
  backend->HoldSmall();
  const core::HandlePtr small = self.SmallSum(1, 1);
  EXPECT_TRUE(self.Finish(self.RemoveSet(2)).ok());
  EXPECT_FALSE(small->done());
  const core::TimePoint limit = core::Clock::now() + std::chrono::seconds(30);
  while (self.lanes->Running().size() > 1 && core::Clock::now() < limit) std::this_thread::yield();

  const int before = backend->operations();
  const core::HandlePtr removed = self.RemoveSet(1);
  const core::HandlePtr large = self.LargeSum(0, 1);
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(self.lanes->Step());
  EXPECT_FALSE(removed->done());
  EXPECT_EQ(backend->operations(), before);
  const std::vector<core::RunningOperation> running = self.lanes->Running();
  ASSERT_EQ(running.size(), 3u);
  EXPECT_EQ(running[1].set, 1u);
  EXPECT_EQ(running[1].what, "removing process set 1");
  EXPECT_TRUE(self.lanes->NeedsStepping());

  backend->LetSmallGo();
  EXPECT_TRUE(self.Finish(removed).ok());
  EXPECT_TRUE(small->done());
  EXPECT_TRUE(self.Finish(large).ok());
}

TEST_F(HostLanesSetsTest, AChangeThatFailsEndsTheLanes) {
  const auto backend = std::make_shared<FakeBackend>();
  Rank self(0, 2, backend);
  backend->FailFrom(0, {StatusCode::kBackend, "the wire broke"});
  const core::HandlePtr added = self.AddSet(3, {0, 1});
  const Status status = self.Finish(added);
  EXPECT_EQ(status.message(), "adding process set 3 of ranks 0-1: the wire broke");
  EXPECT_EQ(status.origin().rank, 0);
  EXPECT_EQ(self.failures, 1);
  EXPECT_EQ(self.RemoveSet(3)->status(), status);
}

TEST_F(HostLanesSetsTest, AbandonCompletesAChangeThatWaits) {
  const auto backend = std::make_shared<FakeBackend>();
  Rank self(0, 1, backend);
  EXPECT_TRUE(self.Finish(self.AddSet(1, {0})).ok());
  backend->HoldSmall();
  const core::HandlePtr small = self.SmallSum(1, 1);
  const core::HandlePtr removed = self.RemoveSet(1);
  const Status why(StatusCode::kPeerLost, "rank 3 is lost");
  self.lanes->Abandon(why);
  EXPECT_EQ(small->status(), why);
  EXPECT_EQ(removed->status(), why);
}

// A rank that has joined has no handle of its own for it.
TEST_F(HostLanesSetsTest, AChangeMayHaveNoHandle) {
  const auto backend = std::make_shared<FakeBackend>();
  Rank self(0, 1, backend);
  self.sets[1] = {0};
  self.lanes->AddSet(1, {0}, nullptr, core::Clock::now());
  EXPECT_TRUE(self.Finish(self.AddSet(2, {0})).ok());
  EXPECT_TRUE(self.Finish(self.SmallSum(1, 1)).ok());
}

TEST(HostLanesSetsFailureTest, AThreadThatIsStuckInAChangeIsLeftBehind) {
  const auto backend = std::make_shared<FakeBackend>();
  auto self = std::make_unique<Rank>(0, 1, backend);
  backend->Block(/*abort_frees=*/false);
  auto watched = std::make_shared<int>(0);
  const std::weak_ptr<int> alive = watched;
  core::WorkPtr work = NewWork();
  work->keep_alive = std::move(watched);
  const core::HandlePtr handle = work->handle;
  self->lanes->AddSet(1, {0}, std::move(work), core::Clock::now());
  self->Drive([&] { return backend->inside(); });
  EXPECT_EQ(self->lanes->Running().front().what, "adding process set 1 of ranks 0");
  EXPECT_FALSE(self->lanes->Idle());
  self.reset();
  EXPECT_EQ(handle->status().code(), StatusCode::kShutDown);
  backend->Free();
  const core::TimePoint limit = core::Clock::now() + std::chrono::seconds(30);
  while (backend->inside() && core::Clock::now() < limit) std::this_thread::yield();
  EXPECT_FALSE(alive.expired());
}

}  // namespace
}  // namespace sirtaki::ops
