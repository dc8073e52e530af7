// The engine in rounds. See engine_sleep_test.cc for when it comes back.
#include "core/engine/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/core/engine/engine_world.h"

namespace sirtaki::core {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

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
    change->request.asked = Limits{.fusion_bytes = 7};
    ASSERT_TRUE(world[rank].engine->Submit(change, /*will_wait=*/false).ok());
    world.Submit(rank, "after");
    if (rank == 1) {
      world.Settle();
      EXPECT_TRUE(change->handle->done());
    }
  }
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(world[rank].executor.started, (std::vector<std::string>{"\"before\"", "\"after\""}));
    EXPECT_EQ(world[rank].executor.planned_by,
              (std::vector<std::int64_t>{Limits().fusion_bytes, 7}));
    std::uint64_t changes = 0;
    EXPECT_EQ(world[rank].engine->limits().Get(&changes).fusion_bytes, 7);
    EXPECT_EQ(changes, 1U);
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

// While another thread has called `others` and lives.
std::optional<Key> WaitsForBeside(Engine& engine, const std::function<void()>& others) {
  std::latch called(1);
  std::latch looked(1);
  std::thread thread([&] {
    others();
    called.count_down();
    looked.wait();
  });
  called.wait();
  std::optional<Key> waits_for = engine.WaitsFor();
  looked.count_down();
  thread.join();
  return waits_for;
}

// Two ranks, the second with a thread that waits for a call of its own.
class WaitingWorld {
 public:
  explicit WaitingWorld(Duration sits_after = {}, Duration timeout = Duration::max())
      : world_(2, 8, /*stuck_limit=*/seconds(60), /*observed=*/false, sits_after) {
    world_.now = Clock::now();
    thread_ = std::thread([this, timeout] {
      const WorkPtr work = world_.Submit(1, "w", 4, timeout);
      (void)world_[1].engine->Wait(*work->handle, TimePoint::max());
      ended_ = true;
    });
    // What the first rank receives the waiting thread has sent: nobody else drives the other.
    while (!world_[0].engine->RunOnce()) std::this_thread::yield();
  }
  ~WaitingWorld() { End(); }

  void End() {
    if (!thread_.joinable()) return;
    world_.Submit(0, "w");
    while (!ended_) world_[0].engine->RunOnce();
    thread_.join();
  }
  Engine& engine() { return *world_[1].engine; }

 private:
  World world_;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

TEST(EngineTest, ARankWaitsForTheKeyThatItsOnlyThreadWaitsFor) {
  WaitingWorld world;
  Engine& engine = world.engine();
  const Key key = Key::Named(kWorldSet, "w");
  const auto note = [&] { engine.NoteCaller(); };
  const auto serve = [&] {
    const ServingThread serving;
    engine.NoteCaller();
  };
  EXPECT_EQ(WaitsForBeside(engine, [] {}), key);
  EXPECT_EQ(WaitsForBeside(engine, note), std::nullopt);
  EXPECT_EQ(engine.WaitsFor(), key);  // it has gone
  EXPECT_EQ(WaitsForBeside(engine, serve), key);
  const auto serve_with_another = [&] {
    serve();
    EXPECT_EQ(WaitsForBeside(engine, serve), std::nullopt);
  };
  EXPECT_EQ(WaitsForBeside(engine, serve_with_another), key);
  world.End();
  EXPECT_EQ(engine.WaitsFor(), std::nullopt);
}

TEST(EngineTest, AWaitThatIsNewTellsNothing) {
  WaitingWorld world(std::chrono::hours(1));
  EXPECT_EQ(world.engine().WaitsFor(), std::nullopt);
}

TEST(EngineTest, AWaitForACallWithATimeOutEndsByItself) {
  WaitingWorld world({}, seconds(60));
  EXPECT_EQ(world.engine().WaitsFor(), std::nullopt);
}

// A call of another thread may begin at once; the ranks would no longer be in step if that counted.
TEST(EngineTest, WhatWasIdleForAMomentWasIdle) {
  World world(1, 8, /*stuck_limit=*/seconds(60));
  world[0].executor.is_idle = [random = std::mt19937(7)]() mutable { return random() % 4 == 0; };
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(world[0].engine->WaitUntilIdle(Clock::now() + seconds(60)).ok());
  }
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
    EXPECT_TRUE(work->handle->PartIsAbsent(0));
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
    ASSERT_EQ(executor.running.size(), 1u);
    EXPECT_EQ(executor.running[0].absent, (std::vector<bool>{false, true, false}));
    executor.Finish();
    const Work& work = *works[static_cast<std::size_t>(rank)];
    ASSERT_TRUE(work.handle->done());
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(work.handle->PartIsAbsent(i), i == 1) << i;
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

// A set's number is one bit away from another's.
TEST(EngineTest, AMessageThatArrivesChangedIsAFaultOfTheProtocol) {
  World world(2);
  Bytes frame = EncodeFrame({7, PingMessage{4}});
  frame[frame.size() - sizeof(std::uint64_t) - 1] ^= std::byte{1};
  world[1].transport->Send(0, std::move(frame));
  world.Settle();
  EXPECT_EQ(world[0].engine->fault().message(),
            "rank 1 sent a message that cannot be read: its 5 bytes arrived changed: they have "
            "another digest");
}

TEST(EngineTest, ADecisionWithoutARankThatHasNotJoinedIsAFaultOfTheProtocol) {
  World world(2);
  const WorkPtr work = world.Submit(1, "w");
  world.Settle();  // rank 0 knows of it, and decides nothing
  RunEntry run;
  run.key = work->request.key;
  run.signature = work->request.signature();
  run.silent = RankRanges{1};
  world[0].transport->Send(1, EncodeFrame({7, StreamMessage{1, {{kWorldSet, 1, {run}}}}}));
  world.Settle();
  ASSERT_TRUE(work->handle->done());
  EXPECT_EQ(work->handle->status().code(), StatusCode::kProtocol);
  EXPECT_EQ(work->handle->status().message(),
            "the ranks agreed to run \"w\" without this rank, which has submitted it");
}

TEST(EngineTest, MessagesOfAnotherSessionAreDropped) {
  World world(2);
  Cause cause;
  cause.text = "from the session before";
  world[1].transport->Send(0, EncodeFrame({6, FaultMessage{cause}}));
  world.Settle();
  EXPECT_TRUE(world[0].engine->fault().ok());
}

TEST(EngineTest, AFailureOfADataThreadFailsPendingWorkAtOnceAndReachesTheOthers) {
  World world(3, 1);
  const WorkPtr here = world.Submit(2, "w");
  const WorkPtr there = world.Submit(0, "v");
  world.Settle();
  // A program that learns of it may write to tensors with which others still run.
  for (const auto& [rank, work] : {std::pair(2, here), std::pair(0, there)}) {
    world[rank].executor.on_abandon = [work = work, first = true]() mutable {
      if (!std::exchange(first, false)) return;
      EXPECT_FALSE(work->handle->done());
    };
  }
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
  // And stays so when the engine takes it up and tells the others.
  world.Settle();
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(world[rank].engine->fault().origin().rank, 1) << rank;
    EXPECT_EQ(world[rank].engine->fault().origin().host, "there") << rank;
  }
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

// Nobody rings for a process that has ended.
TEST(EngineTest, AProcessThatHasEndedIsAFaultWhileSomebodyWaits) {
  World world(2);
  const Status ended(StatusCode::kPeerLost, "rank 1 is lost: its process, 7, has ended");
  const WorkPtr work = world.Submit(0, "w");
  world[0].engine->RunOnce();
  world[0].peers = ended;
  EXPECT_LE(world[0].engine->NextWake(world.now), world.now + milliseconds(100));
  // It may have said why: that counts, if it is on its way.
  world.now += milliseconds(100);
  world[0].engine->RunOnce();
  EXPECT_FALSE(work->handle->done());
  EXPECT_LE(world[0].engine->NextWake(world.now), world.now + milliseconds(100));
  world.now += milliseconds(100);
  world[0].engine->RunOnce();
  ASSERT_TRUE(work->handle->done());
  EXPECT_EQ(work->handle->status().code(), StatusCode::kPeerLost);
  EXPECT_EQ(work->handle->status().message(), ended.message());
  EXPECT_EQ(world[0].executor.abandoned.code(), StatusCode::kPeerLost);
}

TEST(EngineTest, AProcessThatHasSaidWhyItEndsIsNoLostPeer) {
  World world(2);
  const WorkPtr work = world.Submit(0, "w");
  world[0].engine->RunOnce();
  world[0].peers = Status(StatusCode::kPeerLost, "rank 1 is lost");
  world.now += milliseconds(100);
  world[0].engine->RunOnce();
  world[1].engine->PostFailure(Status(StatusCode::kAborted, "the loss is NaN"), {});
  world[1].engine->RunOnce();
  world.now += milliseconds(100);
  world[0].engine->RunOnce();
  EXPECT_EQ(work->handle->status().message(), "the loss is NaN");
}

// A data thread may post it in the middle of the round that looks.
TEST(EngineTest, AFaultThatWasPostedSaysMoreThanTheEndOfAProcess) {
  World world(2);
  const WorkPtr work = world.Submit(0, "w");
  world[0].engine->RunOnce();
  world[0].peers = Status(StatusCode::kPeerLost, "rank 1 is lost");
  world.now += milliseconds(100);
  world[0].engine->RunOnce();
  world[0].transport->before_receive = [&] {
    world[0].engine->PostFailure({StatusCode::kAborted, "the loss is NaN"}, {});
  };
  world.now += milliseconds(100);
  world[0].engine->RunOnce();
  world[0].engine->RunOnce();
  EXPECT_EQ(work->handle->status().message(), "the loss is NaN");
  EXPECT_EQ(world[0].engine->fault().message(), "the loss is NaN");
  EXPECT_EQ(world[0].executor.abandoned.message(), "the loss is NaN");
}

TEST(EngineTest, NobodyLooksForProcessesWhileNothingIsOutstandingOrAllHaveLeft) {
  World world(2);
  for (int i = 0; i < 10; ++i) {
    world.now += milliseconds(100);
    world.Settle();
  }
  EXPECT_EQ(world[0].looks, 0);
  EXPECT_GT(world[0].engine->NextWake(world.now), world.now + milliseconds(100));
  // A rank that has ended after all had left has ended in order.
  world[0].negotiator->Leave("done", world.now);
  world[1].negotiator->Leave("done", world.now);
  for (int rank = 1; rank >= 0; --rank) world[rank].engine->RunOnce();
  world[1].peers = Status(StatusCode::kPeerLost, "rank 0 is lost");
  for (int i = 0; i < 3; ++i) {
    world.now += milliseconds(100);
    world[1].engine->RunOnce();
  }
  EXPECT_TRUE(world[1].engine->fault().ok()) << world[1].engine->fault().ToString();
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
  // The handle does what a data thread does that fails while the batch [Run a, Fail b, Run c] is
  // being started.
  wrong->handle = std::make_shared<HandleState>();
  wrong->handle->Then(
      [&world] { world[0].engine->PostFailure(Status(StatusCode::kBackend, "broken"), "x"); });
  for (const WorkPtr& work : {first, wrong, last}) {
    EXPECT_TRUE(world[0].engine->Submit(work, false).ok());
  }
  for (const char* name : {"a", "b", "c"}) world.Submit(1, name);
  world.Settle();
  for (const WorkPtr& work : {first, wrong, last}) EXPECT_TRUE(work->handle->done());
  EXPECT_EQ(first->handle->status().message(), "broken");
  EXPECT_TRUE(world[0].executor.started.empty());
}

// The answer has come and lies unread, as after SIGSTOP and SIGCONT, or where MPI was paused.
TEST(EngineTest, TimeInWhichThisRankDidNotRunIsNotALostPeer) {
  for (const bool paused : {false, true}) {
    World world(2);
    const WorkPtr work = world.Submit(0, "w");
    world.Settle();
    world.now += seconds(2);
    world[0].engine->RunOnce();  // pings
    if (paused && !world[0].engine->Pause()) FAIL() << "something runs";
    world.now += std::chrono::minutes(20);
    if (paused) world[0].engine->Resume();
    world[0].engine->RunOnce();  // MPI finds nothing at its first look
    EXPECT_TRUE(world[0].engine->fault().ok()) << world[0].engine->fault().ToString();
    world[1].engine->RunOnce();
    world.Submit(1, "w");
    world.Settle();
    ASSERT_TRUE(work->handle->done());
    EXPECT_TRUE(work->handle->status().ok()) << work->handle->status().ToString();
  }
}

// The fault of an exception completes what the exception has left in nobody's hands.
TEST(EngineTest, AnExceptionBetweenTakingAndStartingLosesNoHandle) {
  World world(2);
  world[0].on_start = [&] { throw std::runtime_error("on_start failed"); };
  std::vector<WorkPtr> works;
  for (const int rank : {1, 0}) {
    works.push_back(world.Submit(rank, "before"));
    auto change = std::make_shared<Work>();
    change->request.key = Key::Named(kWorldSet, "change");
    change->request.asked = Limits{.fusion_bytes = 7};
    ASSERT_TRUE(world[rank].engine->Submit(change, /*will_wait=*/false).ok());
    works.push_back(change);
    works.push_back(world.Submit(rank, "after"));
  }
  world.Settle();
  for (const WorkPtr& work : works) {
    const std::string what = work->request.key.ToString();
    ASSERT_TRUE(work->handle->done()) << what;
    // What has started before the exception may have ended well.
    if (work->handle->status().ok()) continue;
    EXPECT_EQ(work->handle->status().code(), StatusCode::kBackend) << what;
    EXPECT_EQ(work->handle->status().message(), "the engine failed: on_start failed");
  }
  EXPECT_EQ(world[0].engine->fault().code(), StatusCode::kBackend);
  EXPECT_EQ(world[1].engine->fault().code(), StatusCode::kBackend);
}

TEST(EngineTest, AnExceptionInTheCallbackOfAFaultLosesNoWordToThePeers) {
  World world(2);
  world[0].on_fault = [&] {
    if (world[0].faults_heard.size() == 1) throw std::runtime_error("on_fault failed");
  };
  world[0].engine->Abort(StatusCode::kAborted, "no more data");
  world.Settle();  // up to the round that throws, which counts as one in which nothing moves
  world.Settle();
  EXPECT_EQ(world[1].engine->fault().message(), "no more data");
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

TEST(EngineTest, TellsOfWhichStepItsLastBucketIsAndWhatItHolds) {
  World world(2);
  auto signature = std::make_shared<Signature>();
  signature->parts = {std::make_shared<const Signature>()};
  const auto work = std::make_shared<Work>();
  work->request = {Key::Bucket(kWorldSet, 1, 3), std::move(signature), {}, {}};
  work->parts = {std::make_shared<Work>()};
  world[0].step = 7;
  ASSERT_TRUE(world[0].engine->Submit(work, false).ok());
  world.Settle();
  world.now += seconds(3);
  EXPECT_EQ(world[0].engine->Activity(),
            "last submitted \"c.bias\" 3 s ago, in step 7, which is not over");
  world[0].step = 8;
  EXPECT_EQ(world[0].engine->Activity(),
            "last submitted \"c.bias\" 3 s ago, in step 7, and is in step 8");
  world[1].engine->PostFailure({StatusCode::kTimedOut, "bucket 3 of arena 1 has waited 2 s"},
                               "bucket 3 of arena 1");
  world.Settle();
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(world[rank].engine->fault().message(), "\"c.bias\" has waited 2 s");
    EXPECT_EQ(world[rank].engine->fault().origin().tensor, "\"c.bias\"");
  }
  EXPECT_EQ(work->handle->status().message(), "\"c.bias\" has waited 2 s");
}

}  // namespace
}  // namespace sirtaki::core
