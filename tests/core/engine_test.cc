// The engine in rounds, on a clock that the test moves: nothing here sleeps or runs on its own.
#include "core/engine.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/inproc_hub.h"
#include "core/tree.h"

namespace sirtaki::core {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Completes everything when told to, or at once.
class FakeExecutor final : public Executor {
 public:
  void Start(RunBatch batch, TimePoint now) override {
    for (RunItem& item : batch.items) {
      started.push_back(item.key.ToString());
      since = now;
      running.push_back(std::move(item));
    }
    if (at_once) Finish();
  }
  void AddSet(SetNumber set, const RankRanges&, WorkPtr work, TimePoint) override {
    added.push_back(set);
    if (work) work->handle->Complete(Status::Ok());
  }
  void RemoveSet(SetNumber set, WorkPtr work, TimePoint) override {
    removed.push_back(set);
    if (work) work->handle->Complete(Status::Ok());
  }
  void SetLimits(const std::vector<std::int64_t>& values) override {
    started.push_back("limits " + std::to_string(values.front()));
  }
  void StartMessage(WorkPtr work, TimePoint) override { messages.push_back(std::move(work)); }
  bool Step(TimePoint) override { return false; }
  bool NeedsStepping() const override { return needs_stepping && !running.empty(); }
  bool NeedsPolling() const override { return NeedsStepping() && !rings; }
  bool Idle() const override { return running.empty(); }
  std::vector<RunningOperation> Running() const override {
    std::vector<RunningOperation> result;
    for (const RunItem& item : running)
      result.push_back({item.key.set, item.key.ToString(), since});
    return result;
  }
  void Abandon(const Status& why) override {
    abandoned = why;
    for (const RunItem& item : running) {
      if (item.work) item.work->handle->Complete(why);
    }
    running.clear();
  }

  void Finish() {
    for (const RunItem& item : running) {
      if (item.work) item.work->handle->Complete(Status::Ok());
    }
    running.clear();
  }

  bool at_once = true;
  bool needs_stepping = false;
  bool rings = false;
  TimePoint since{};
  std::vector<SetNumber> added;
  std::vector<SetNumber> removed;
  std::vector<WorkPtr> messages;
  std::vector<RunItem> running;
  std::vector<std::string> started;
  Status abandoned;
};

// As MPI: an arrival rings nothing.
class SilentTransport final : public Transport {
 public:
  explicit SilentTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}
  void Send(int rank, Bytes bytes) override { inner_->Send(rank, std::move(bytes)); }
  std::optional<Incoming> TryReceive() override { return inner_->TryReceive(); }
  bool Flush() override { return flushed; }
  Status health() const override { return inner_->health(); }
  std::uint64_t ArmDoorbell() override { return inner_->ArmDoorbell(); }
  bool WaitUntil(std::uint64_t ticket, TimePoint deadline) override {
    return inner_->WaitUntil(ticket, deadline);
  }
  void Wake() override { inner_->Wake(); }
  bool ArrivalsRing() const override { return rings; }

  bool rings = true;
  bool flushed = true;

 private:
  std::unique_ptr<Transport> inner_;
};

struct Rank {
  std::unique_ptr<SilentTransport> transport;
  std::unique_ptr<Negotiator> negotiator;
  TensorQueue queue;
  FakeExecutor executor;
  std::unique_ptr<Engine> engine;
  std::vector<Status> faults_heard;
};

class World {
 public:
  // Each rank is a host of its own, so that arity 1 makes a chain 0 - 1 - 2.
  explicit World(int size, int arity = 8) : hub(size) {
    std::vector<int> hosts;
    for (int rank = 0; rank < size; ++rank) hosts.push_back(rank);
    const Tree tree = Tree::Build(hosts, arity);
    for (int rank = 0; rank < size; ++rank) {
      ranks.push_back(std::make_unique<Rank>());
      Rank& r = *ranks.back();
      r.transport = std::make_unique<SilentTransport>(hub.Connect(rank));
      NegotiatorOptions negotiation;
      negotiation.rank = rank;
      negotiation.host = "host" + std::to_string(rank);
      negotiation.sets = {{kWorldSet, RankRanges::Span(0, size - 1)}};
      r.negotiator = std::make_unique<Negotiator>(std::move(negotiation), tree);
      EngineOptions options;
      options.session = 7;
      options.rank = rank;
      options.host = "host" + std::to_string(rank);
      options.now = [this] { return now; };
      options.on_fault = [&r](const Status& cause) { r.faults_heard.push_back(cause); };
      r.engine = std::make_unique<Engine>(std::move(options), *r.transport, *r.negotiator, r.queue,
                                          r.executor);
    }
  }

  Rank& operator[](int rank) { return *ranks[static_cast<std::size_t>(rank)]; }

  // Rounds on all ranks until nothing moves any more.
  void Settle() {
    for (int i = 0; i < 1000; ++i) {
      bool moved = false;
      for (const auto& rank : ranks) moved |= rank->engine->RunOnce();
      if (!moved) return;
    }
    FAIL() << "the ranks do not come to rest";
  }

  WorkPtr Submit(int rank, const std::string& name, std::int64_t elements = 4,
                 Duration timeout = Duration::max()) {
    auto signature = std::make_shared<Signature>();
    signature->shape = {elements};
    auto work = std::make_shared<Work>();
    work->request = {Key::Named(kWorldSet, name), std::move(signature), {}, {}};
    if (timeout != Duration::max()) work->deadline = now + timeout;
    const Status accepted = (*this)[rank].engine->Submit(work, false);
    EXPECT_TRUE(accepted.ok()) << accepted.ToString();
    return work;
  }

  TimePoint now{seconds(1000)};
  InprocHub hub;
  std::vector<std::unique_ptr<Rank>> ranks;
};

TEST(EngineTest, WorkRunsWhenEveryRankHasSubmittedIt) {
  World world(3);
  const WorkPtr zero = world.Submit(0, "w");
  const WorkPtr one = world.Submit(1, "w");
  world.Settle();
  EXPECT_FALSE(zero->handle->done());
  EXPECT_TRUE(world[0].executor.started.empty());
  const WorkPtr two = world.Submit(2, "w");
  world.Settle();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(world[rank].executor.started, std::vector<std::string>{"\"w\""});
  }
  for (const WorkPtr& work : {zero, one, two}) {
    ASSERT_TRUE(work->handle->done());
    EXPECT_TRUE(work->handle->status().ok());
  }
}

TEST(EngineTest, AChangeOfLimitsTakesItsPlaceBetweenWhatIsStarted) {
  World world(2);
  for (int rank = 0; rank < 2; ++rank) {
    world.Submit(rank, "before");
    auto change = std::make_shared<Work>();
    change->request.key = Key::Named(kWorldSet, "change");
    change->request.signature =
        std::make_shared<const Signature>(Signature{.kind = OpKind::kSetLimits, .shape = {7}});
    ASSERT_TRUE(world[rank].engine->Submit(change, /*will_wait=*/false).ok());
    world.Submit(rank, "after");
    if (rank == 1) {
      world.Settle();
      EXPECT_TRUE(change->handle->done());
    }
  }
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(world[rank].executor.started,
              (std::vector<std::string>{"\"before\"", "limits 7", "\"after\""}));
  }
}

TEST(EngineTest, AMismatchFailsOnEveryRankAndTheNameWorksAgain) {
  World world(2);
  const WorkPtr zero = world.Submit(0, "w", 4);
  const WorkPtr one = world.Submit(1, "w", 5);
  world.Settle();
  for (const WorkPtr& work : {zero, one}) {
    ASSERT_TRUE(work->handle->done());
    EXPECT_EQ(work->handle->status().code(), StatusCode::kMismatch);
    EXPECT_EQ(work->handle->status().origin(), (Origin{-1, {}, "w"}));
    work->handle->Observe();
  }
  EXPECT_TRUE(world[0].executor.started.empty());
  const WorkPtr again = world.Submit(0, "w", 4);
  world.Submit(1, "w", 4);
  world.Settle();
  ASSERT_TRUE(again->handle->done());
  EXPECT_TRUE(again->handle->status().ok());
  EXPECT_TRUE(world[0].engine->fault().ok());
}

TEST(EngineTest, ARefusedSubmissionLeavesTheNameWithItsHolder) {
  World world(2);
  const WorkPtr first = world.Submit(0, "w");
  for (int i = 0; i < 2; ++i) {
    auto second = std::make_shared<Work>();
    second->request = first->request;
    const Status refused = world[0].engine->Submit(second, false);
    EXPECT_EQ(refused.code(), StatusCode::kDuplicateName);
    EXPECT_EQ(refused.origin().tensor, "w");
  }
  first->handle->Complete(Status::Ok());
  first->handle->Observe();
  world.Submit(0, "w");
}

TEST(EngineTest, AbsentEverywhereIsSeenInTheHandle) {
  World world(2);
  std::vector<WorkPtr> works;
  for (int rank = 0; rank < 2; ++rank) {
    auto work = std::make_shared<Work>();
    work->request = {Key::Named(kWorldSet, "w"), std::make_shared<Signature>(), {}, {true}};
    ASSERT_TRUE(world[rank].engine->Submit(work, false).ok());
    works.push_back(work);
  }
  world.Settle();
  for (const WorkPtr& work : works) {
    ASSERT_TRUE(work->handle->done());
    EXPECT_TRUE(work->handle->absent_everywhere());
  }
}

TEST(EngineTest, OfABucketOnlyWhatNobodyHasIsAbsent) {
  World world(2);
  for (int rank = 0; rank < 2; ++rank) world[rank].executor.at_once = false;
  auto signature = std::make_shared<Signature>();
  for (int i = 0; i < 3; ++i) signature->parts.push_back(std::make_shared<Signature>());
  std::vector<WorkPtr> works;
  for (int rank = 0; rank < 2; ++rank) {
    auto work = std::make_shared<Work>();
    for (int i = 0; i < 3; ++i) work->parts.push_back(std::make_shared<Work>());
    work->request = {Key::Bucket(kWorldSet, 1, 0), signature, {}, {rank == 0, true, rank == 1}};
    ASSERT_TRUE(world[rank].engine->Submit(work, false).ok());
    works.push_back(work);
  }
  world.Settle();
  for (int rank = 0; rank < 2; ++rank) {
    FakeExecutor& executor = world[rank].executor;
    ASSERT_EQ(executor.running.size(), 3u);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(executor.running[i].absent_everywhere, i == 1) << i;
    }
    executor.Finish();
    const Work& work = *works[static_cast<std::size_t>(rank)];
    ASSERT_TRUE(work.handle->done());
    EXPECT_FALSE(work.handle->absent_everywhere());
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(work.parts[i]->handle->absent_everywhere(), i == 1) << i;
    }
  }
}

TEST(EngineTest, AMessageThatCannotBeReadIsAFaultOfTheProtocol) {
  World world(2);
  const WorkPtr work = world.Submit(0, "w");
  world[1].transport->Send(0, Bytes(17, std::byte{0xEE}));
  world.Settle();
  EXPECT_EQ(world[0].engine->fault().code(), StatusCode::kProtocol);
  EXPECT_NE(world[0].engine->fault().message().find("rank 1"), std::string::npos);
  ASSERT_TRUE(work->handle->done());
  EXPECT_EQ(work->handle->status().code(), StatusCode::kProtocol);
  EXPECT_EQ(world[1].engine->fault().code(), StatusCode::kProtocol);
}

TEST(EngineTest, MessagesOfAnotherSessionAreDropped) {
  World world(2);
  Cause cause;
  cause.text = "from the session before";
  world[1].transport->Send(0, Encode({6, FaultMessage{cause}}));
  world.Settle();
  EXPECT_TRUE(world[0].engine->fault().ok());
}

TEST(EngineTest, AFailureOfADataThreadFailsPendingWorkAtOnceAndReachesTheOthers) {
  World world(3, 1);
  const WorkPtr here = world.Submit(2, "w");
  const WorkPtr there = world.Submit(0, "v");
  world.Settle();
  world[2].engine->PostFailure(Status(StatusCode::kBackend, "the network card is on fire"), "w");
  ASSERT_TRUE(here->handle->done());  // before any round
  EXPECT_EQ(here->handle->status().code(), StatusCode::kBackend);
  EXPECT_FALSE(there->handle->done());
  world.Settle();
  ASSERT_TRUE(there->handle->done());
  for (int rank = 0; rank < 3; ++rank) {
    const Status fault = world[rank].engine->fault();
    EXPECT_EQ(fault.code(), StatusCode::kBackend);
    EXPECT_EQ(fault.message(), "the network card is on fire");
    EXPECT_EQ(fault.origin().rank, 2);
    EXPECT_EQ(fault.origin().host, "host2");
    EXPECT_EQ(world[rank].executor.abandoned.code(), StatusCode::kBackend);
    EXPECT_EQ(world[rank].faults_heard.size(), 1u);
  }
}

TEST(EngineTest, AFailureThatAMediumTellsOfIsItsRanks) {
  World world(2);
  const WorkPtr work = world.Submit(0, "w");
  world[0].engine->PostFailure(Status(StatusCode::kAborted, "out of data", {1, "there", {}}), "w");
  EXPECT_EQ(world[0].engine->fault().origin().rank, 1);
  EXPECT_EQ(world[0].engine->fault().origin().host, "there");
  EXPECT_EQ(work->handle->status().origin().rank, 1);
}

TEST(EngineTest, AFailedTransportIsAFault) {
  World world(2);
  const WorkPtr work = world.Submit(0, "w");
  world.hub.Break(0, Status(StatusCode::kPeerLost, "the connection to rank 1 failed"));
  world[0].engine->RunOnce();
  EXPECT_EQ(world[0].engine->fault().code(), StatusCode::kPeerLost);
  ASSERT_TRUE(work->handle->done());
  EXPECT_EQ(work->handle->status().message(), "the connection to rank 1 failed");
}

TEST(EngineTest, WorkIsRefusedWithTheCauseAfterAFault) {
  World world(2);
  world[0].engine->PostFailure(Status(StatusCode::kBackend, "broken"), {});
  world.Settle();
  auto work = std::make_shared<Work>();
  work->request = {Key::Named(kWorldSet, "late"), std::make_shared<Signature>(), {}, {}};
  const Status refused = world[1].engine->Submit(work, false);
  EXPECT_EQ(refused.code(), StatusCode::kBackend);
  EXPECT_EQ(refused.message(), "broken");
}

TEST(EngineTest, ACallThatIsNotAgreedInTimeIsAFaultThatNamesIt) {
  World world(2);
  const WorkPtr work = world.Submit(0, "slow", 4, seconds(2));
  world.Settle();
  EXPECT_LE(world[0].engine->NextWake(world.now), world.now + seconds(2));
  world.now += milliseconds(1999);
  world.Settle();
  EXPECT_TRUE(world[0].engine->fault().ok());
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + milliseconds(1));
  world.now += milliseconds(1);
  world.Settle();
  EXPECT_EQ(work->handle->status().code(), StatusCode::kTimedOut);
  EXPECT_NE(work->handle->status().message().find("\"slow\""), std::string::npos);
  EXPECT_EQ(
      work->handle->status().message(),
      "\"slow\" did not finish within its time-out of 2 s; not submitted by rank 1; rank 1: no "
      "activity known");
  EXPECT_EQ(work->handle->status().origin().tensor, "slow");
  EXPECT_EQ(world[1].engine->fault().code(), StatusCode::kTimedOut);
  EXPECT_EQ(world[1].engine->fault().origin().rank, 0);
}

TEST(EngineTest, ACallThatHangsInALaneTimesOutToo) {
  World world(2);
  for (int rank = 0; rank < 2; ++rank) world[rank].executor.at_once = false;
  const WorkPtr work = world.Submit(0, "w", 4, seconds(2));
  world.Submit(1, "w");
  world.Settle();
  ASSERT_FALSE(world[0].executor.Idle());
  world.now += seconds(2);
  world.Settle();
  ASSERT_TRUE(work->handle->done());
  EXPECT_EQ(work->handle->status().code(), StatusCode::kTimedOut);
}

TEST(EngineTest, ACallThatIsDoneInTimeDoesNotTimeOutLater) {
  World world(2);
  const WorkPtr work = world.Submit(0, "w", 4, seconds(2));
  world.Submit(1, "w");
  world.Settle();
  ASSERT_TRUE(work->handle->done());
  world.now += seconds(60);
  world.Settle();
  EXPECT_TRUE(world[0].engine->fault().ok());
}

TEST(EngineTest, NothingStartsAfterADataThreadHasFailed) {
  World world(2);
  world.Submit(0, "w");
  world.Submit(1, "w");
  world[1].engine->RunOnce();
  world[0].engine->RunOnce();  // decides
  world[1].engine->PostFailure(Status(StatusCode::kBackend, "broken"), "x");
  world[1].engine->RunOnce();
  EXPECT_TRUE(world[1].executor.started.empty());
  EXPECT_EQ(world[1].engine->fault().message(), "broken");
}

TEST(EngineTest, WhatIsResolvedCompletesWhenTheQueueClosesMeanwhile) {
  World world(2);
  auto make = [](const std::string& name) {
    auto signature = std::make_shared<Signature>();
    signature->shape = {4};
    auto work = std::make_shared<Work>();
    work->request = {Key::Named(kWorldSet, name), std::move(signature), {}, {}};
    return work;
  };
  const WorkPtr first = make("a");
  const WorkPtr wrong = make("b");
  const WorkPtr last = make("c");
  wrong->request.invalid = "wrong";
  // As a data thread that fails while the batch [Run a, Fail b, Run c] is being started.
  wrong->handle = std::make_shared<HandleState>(
      [&world] { world[0].engine->PostFailure(Status(StatusCode::kBackend, "broken"), "x"); },
      nullptr);
  wrong->handle->BeginWait();
  for (const WorkPtr& work : {first, wrong, last}) {
    EXPECT_TRUE(world[0].engine->Submit(work, false).ok());
  }
  for (const char* name : {"a", "b", "c"}) world.Submit(1, name);
  world.Settle();
  for (const WorkPtr& work : {first, wrong, last}) EXPECT_TRUE(work->handle->done());
  EXPECT_EQ(first->handle->status().message(), "broken");
  EXPECT_TRUE(world[0].executor.started.empty());
}

TEST(EngineTest, HeldWorkTimesOutToo) {
  World world(2);
  world.Submit(0, "w")->handle->Observe();  // dropped early: the next use is held back behind it
  const WorkPtr held = world.Submit(0, "w", 4, seconds(5));
  world.Settle();
  EXPECT_FALSE(held->handle->done());
  EXPECT_LE(world[0].engine->NextWake(world.now), world.now + seconds(5));
  world.now += seconds(6);
  world.Settle();
  ASSERT_TRUE(held->handle->done());
  EXPECT_EQ(held->handle->status().code(), StatusCode::kTimedOut);
}

TEST(EngineTest, TheEndWaitsForItsLastWordButNotForEver) {
  World world(2);
  world[0].negotiator->Leave("done", world.now);
  world[1].negotiator->Leave("done", world.now);
  world[0].transport->flushed = false;
  world.Settle();
  EXPECT_FALSE(world[0].engine->closed());
  EXPECT_TRUE(world[1].engine->closed());
  world.now += seconds(11);
  world.Settle();
  EXPECT_TRUE(world[0].engine->closed());
}

TEST(EngineTest, AHandleMayOutliveItsEngine) {
  HandlePtr handle;
  {
    World world(2);
    handle = world.Submit(0, "w")->handle;
  }
  ASSERT_TRUE(handle->done());
  handle->Observe();
}

TEST(EngineTest, IdleEnginesOfARingingTransportSleepLong) {
  World world(2);
  world.Submit(0, "w");
  world.Submit(1, "w");
  world.Settle();
  world.now += seconds(1);
  world.Settle();
  EXPECT_GE(world[0].engine->NextWake(world.now), world.now + milliseconds(100));
}

TEST(EngineTest, WithoutRingingThePollCoolsDown) {
  World world(2);
  world[0].transport->rings = false;
  const WorkPtr work = world.Submit(0, "w");
  world.Settle();
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + microseconds(20));
  world.now += milliseconds(10);
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + microseconds(500));
  world.now += seconds(1);
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + milliseconds(1));
  world.Submit(1, "w");
  world.Settle();
  ASSERT_TRUE(work->handle->done());
  world.now += seconds(1);
  world.Settle();
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + milliseconds(10));
}

TEST(EngineTest, UnfinishedNonBlockingCallsAskForThePoll) {
  World world(2);
  for (int rank = 0; rank < 2; ++rank) {
    world[rank].executor.at_once = false;
    world[rank].executor.needs_stepping = true;
    world.Submit(rank, "w");
  }
  world.Settle();
  world.now += seconds(1);
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + milliseconds(1));
}

// They may be far apart, since something rings; but a lost peer rings nobody.
TEST(EngineTest, NonBlockingCallsThatRingAskForNoPoll) {
  World world(2);
  for (int rank = 0; rank < 2; ++rank) {
    world[rank].executor.at_once = false;
    world[rank].executor.needs_stepping = true;
    world[rank].executor.rings = true;
    world.Submit(rank, "w");
  }
  world.Settle();
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + milliseconds(50));
  world[0].transport->rings = false;
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + microseconds(20));
}

TEST(EngineTest, AFullOutboxAsksForThePoll) {
  World world(2);
  world[0].transport->flushed = false;
  world.Submit(0, "w");
  world.Settle();
  world.now += milliseconds(1);
  EXPECT_EQ(world[0].engine->NextWake(world.now), world.now + microseconds(50));
}

TEST(EngineTest, TellsWhatItDidLast) {
  World world(2);
  EXPECT_EQ(world[0].engine->Activity(), "has submitted nothing yet");
  for (int rank = 0; rank < 2; ++rank) {
    world[rank].executor.at_once = false;
    world.Submit(rank, "w");
  }
  world.Settle();
  world.now += seconds(3);
  EXPECT_EQ(world[0].engine->Activity(), "last submitted \"w\" 3 s ago, runs \"w\" for 3 s");
}

}  // namespace
}  // namespace sirtaki::core
