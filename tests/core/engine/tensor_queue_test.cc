#include "core/engine/tensor_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/calling_watcher.h"
#include "tests/support/test_scale.h"

namespace sirtaki::core {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr TimePoint kNever = TimePoint::max();

TimePoint At(int seconds) { return TimePoint() + std::chrono::seconds(seconds); }

class TensorQueueTest : public ::testing::Test {
 protected:
  // Work whose handle tells the queue when it is observed, as the engine's handles do.
  WorkPtr MakeWork(const Key& key, TimePoint deadline = kNever) {
    auto work = std::make_shared<Work>();
    work->request.key = key;
    work->deadline = deadline;
    work->handle = std::make_shared<HandleState>(
        tests::WhenObserved([this, key] { queue_.ReleaseName(key); }));
    return work;
  }
  static WorkPtr MakeUnnamed(SetNumber set) {
    auto work = std::make_shared<Work>();
    work->request.key = Key::Unnamed(set, 0);
    work->handle = std::make_shared<HandleState>();
    return work;
  }
  void Finish(const WorkPtr& work) {
    ASSERT_EQ(queue_.Resolve(work->request.key), work);
    work->handle->Complete(Status::Ok());
  }

  TensorQueue queue_;
};

TEST_F(TensorQueueTest, GivesWorkInTheOrderOfItsAcceptance) {
  const WorkPtr a = MakeWork(Key::Named(0, "a"));
  const WorkPtr b = MakeWork(Key::Bucket(0, 1, 2));
  EXPECT_FALSE(queue_.HasNew());
  EXPECT_TRUE(queue_.Push(a).ok());
  EXPECT_TRUE(queue_.Push(b).ok());
  EXPECT_TRUE(queue_.HasNew());
  EXPECT_THAT(queue_.Take(), ElementsAre(a, b));
  EXPECT_FALSE(queue_.HasNew());
  EXPECT_TRUE(queue_.Take().empty());
}

TEST_F(TensorQueueTest, WorkStaysPendingUntilItIsResolved) {
  const WorkPtr work = MakeWork(Key::Named(0, "w"));
  ASSERT_TRUE(queue_.Push(work).ok());
  queue_.Take();
  EXPECT_EQ(queue_.pending(), 1U);
  EXPECT_EQ(queue_.Resolve(Key::Named(0, "w")), work);
  EXPECT_EQ(queue_.Resolve(Key::Named(0, "w")), nullptr);
  EXPECT_EQ(queue_.pending(), 0U);
}

// What the queue keeps of names that are over is dropped now and then.
TEST_F(TensorQueueTest, NamesInFlightOutliveThousandsThatAreUsedOnce) {
  const Key pending = Key::Named(0, "pending");
  const Key observed_late = Key::Named(0, "observed late");
  const WorkPtr work = MakeWork(pending);
  const WorkPtr late = MakeWork(observed_late);
  ASSERT_TRUE(queue_.Push(work).ok());
  ASSERT_TRUE(queue_.Push(late).ok());
  Finish(late);
  for (int i = 0; i < 5000; ++i) {
    const WorkPtr once = MakeWork(Key::Named(0, std::to_string(i)));
    ASSERT_TRUE(queue_.Push(once).ok());
    Finish(once);
    once->handle->Observe();
  }
  for (const Key& key : {pending, observed_late}) {
    const WorkPtr refused = MakeWork(key);
    EXPECT_EQ(queue_.Push(refused).code(), StatusCode::kDuplicateName);
    refused->handle->Refuse(Status(StatusCode::kDuplicateName, "refused"));
  }
  Finish(work);
  for (const WorkPtr& each : {work, late}) each->handle->Observe();
  for (const Key& key : {pending, observed_late, Key::Named(0, "7")}) {
    const WorkPtr again = MakeWork(key);
    EXPECT_TRUE(queue_.Push(again).ok());
    Finish(again);
  }
  EXPECT_EQ(queue_.pending(), 0U);
}

TEST_F(TensorQueueTest, ANameIsInFlightUntilItsHandleWasObserved) {
  const WorkPtr first = MakeWork(Key::Named(0, "w"));
  ASSERT_TRUE(queue_.Push(first).ok());
  queue_.Take();
  const WorkPtr second = MakeWork(Key::Named(0, "w"));
  Status refused = queue_.Push(second);
  EXPECT_EQ(refused.code(), StatusCode::kDuplicateName);
  EXPECT_THAT(refused.message(), HasSubstr("\"w\""));
  EXPECT_FALSE(second->handle->done()) << "refused work is untouched";

  Finish(first);
  EXPECT_EQ(queue_.Push(second).code(), StatusCode::kDuplicateName);
  first->handle->Observe();
  EXPECT_TRUE(queue_.Push(second).ok());
}

TEST_F(TensorQueueTest, TheSameNameInAnotherSetIsAnotherKey) {
  EXPECT_TRUE(queue_.Push(MakeWork(Key::Named(0, "w"))).ok());
  EXPECT_TRUE(queue_.Push(MakeWork(Key::Named(1, "w"))).ok());
}

TEST_F(TensorQueueTest, WorkAfterADroppedHandleIsHeldUntilTheUseBeforeIsResolved) {
  const Key key = Key::Named(0, "w");
  const WorkPtr first = MakeWork(key);
  ASSERT_TRUE(queue_.Push(first).ok());
  first->handle->Observe();  // dropped while it is pending
  const WorkPtr second = MakeWork(key);
  ASSERT_TRUE(queue_.Push(second).ok());
  second->handle->Observe();
  const WorkPtr third = MakeWork(key, At(5));
  ASSERT_TRUE(queue_.Push(third).ok());

  EXPECT_THAT(queue_.Take(), ElementsAre(first));
  EXPECT_EQ(queue_.pending(), 3U);
  EXPECT_EQ(queue_.EarliestDeadline(nullptr), At(5)) << "held work ages too";
  EXPECT_EQ(queue_.Resolve(key), first);
  EXPECT_TRUE(queue_.HasNew());
  EXPECT_THAT(queue_.Take(), ElementsAre(second));
  EXPECT_EQ(queue_.Resolve(key), second);
  EXPECT_EQ(queue_.Resolve(key), third);
  EXPECT_EQ(queue_.Resolve(key), nullptr);
  EXPECT_EQ(queue_.pending(), 0U);
}

TEST_F(TensorQueueTest, NumbersUnnamedCallsBySet) {
  std::vector<std::uint64_t> numbers;
  for (const SetNumber set : {0U, 0U, 3U, 0U}) {
    const WorkPtr work = MakeUnnamed(set);
    ASSERT_TRUE(queue_.Push(work).ok());
    numbers.push_back(work->request.key.number);
  }
  EXPECT_THAT(numbers, ElementsAre(0, 1, 0, 2));
}

TEST_F(TensorQueueTest, CallsOfASetRestartAfterItsEpoch) {
  const WorkPtr before = MakeUnnamed(0);
  ASSERT_TRUE(queue_.Push(before).ok());
  ASSERT_TRUE(queue_.Push(MakeUnnamed(3)).ok());
  Finish(before);
  EXPECT_EQ(queue_.EndEpoch(0), nullptr);
  const WorkPtr restarted = MakeUnnamed(0);
  const WorkPtr other = MakeUnnamed(3);
  ASSERT_TRUE(queue_.Push(restarted).ok());
  ASSERT_TRUE(queue_.Push(other).ok());
  EXPECT_EQ(restarted->request.key.number, 0U);
  EXPECT_EQ(other->request.key.number, 1U);
}

TEST_F(TensorQueueTest, ClosingCompletesEverythingPendingWithTheFirstCause) {
  const WorkPtr taken = MakeWork(Key::Named(0, "taken"));
  ASSERT_TRUE(queue_.Push(taken).ok());
  queue_.Take();
  taken->handle->Observe();
  const WorkPtr held = MakeWork(Key::Named(0, "taken"));
  ASSERT_TRUE(queue_.Push(held).ok());
  const WorkPtr fresh = MakeWork(Key::Named(0, "fresh"));
  ASSERT_TRUE(queue_.Push(fresh).ok());

  const Status cause(StatusCode::kPeerLost, "rank 3 does not answer", {3, "b", ""});
  queue_.Close(cause);
  queue_.Close(Status(StatusCode::kAborted, "later"));
  EXPECT_TRUE(queue_.closed());
  for (const WorkPtr& work : {taken, held, fresh}) {
    ASSERT_TRUE(work->handle->done());
    EXPECT_EQ(work->handle->status(), cause);
  }
  EXPECT_EQ(queue_.pending(), 0U);
  EXPECT_FALSE(queue_.HasNew());
  EXPECT_EQ(queue_.Resolve(Key::Named(0, "fresh")), nullptr);
  EXPECT_EQ(queue_.EarliestDeadline(nullptr), kNever);

  const WorkPtr late = MakeWork(Key::Named(0, "late"));
  EXPECT_EQ(queue_.Push(late), cause);
  EXPECT_FALSE(late->handle->done());
}

TEST_F(TensorQueueTest, HandlesDroppedByClosingReleaseTheirNames) {
  // Only the queue refers to the work, so closing runs the handle's last word inside the queue.
  ASSERT_TRUE(queue_.Push(MakeWork(Key::Named(0, "w"))).ok());
  queue_.Close(Status(StatusCode::kAborted, "over"));
}

TEST(TensorQueueLifeTest, PendingWorkCompletesWhenTheQueueGoes) {
  auto work = std::make_shared<Work>();
  work->request.key = Key::Named(0, "w");
  work->handle = std::make_shared<HandleState>();
  {
    TensorQueue queue;
    ASSERT_TRUE(queue.Push(work).ok());
  }
  ASSERT_TRUE(work->handle->done());
  EXPECT_EQ(work->handle->status().code(), StatusCode::kShutDown);
}

TEST_F(TensorQueueTest, KnowsTheEarliestDeadline) {
  Key key;
  EXPECT_EQ(queue_.EarliestDeadline(&key), kNever);
  ASSERT_TRUE(queue_.Push(MakeWork(Key::Named(0, "none"))).ok());
  EXPECT_EQ(queue_.EarliestDeadline(&key), kNever);
  ASSERT_TRUE(queue_.Push(MakeWork(Key::Named(0, "late"), At(9))).ok());
  ASSERT_TRUE(queue_.Push(MakeWork(Key::Named(0, "soon"), At(3))).ok());
  Duration limit{};
  EXPECT_EQ(queue_.EarliestDeadline(&key, &limit), At(3));
  EXPECT_EQ(key, Key::Named(0, "soon"));
  EXPECT_EQ(limit, At(3) - TimePoint{});  // never submitted
  queue_.Resolve(Key::Named(0, "soon"));
  EXPECT_EQ(queue_.EarliestDeadline(&key), At(9));
  queue_.Resolve(Key::Named(0, "late"));
  EXPECT_EQ(queue_.EarliestDeadline(nullptr), kNever);
}

// Pushers, one taker, and a close somewhere in between: what was accepted completes exactly once.
TEST(TensorQueueThreadsTest, EveryAcceptedEntryCompletesExactlyOnce) {
  const int rounds = tests::ScaledCount(30, 2000);
  constexpr int kPushers = 3;
  constexpr int kEach = 200;
  for (int round = 0; round < rounds; ++round) {
    TensorQueue queue;
    std::atomic<int> accepted{0};
    std::atomic<int> completed{0};
    std::atomic<int> left{kPushers};
    const auto push_all = [&](int pusher) {
      for (int i = 0; i < kEach; ++i) {
        auto work = std::make_shared<Work>();
        work->request.key = i % 2 == 0
                                ? Key::Unnamed(static_cast<SetNumber>(pusher), 0)
                                : Key::Named(0, std::to_string(pusher) + "/" + std::to_string(i));
        work->handle = std::make_shared<HandleState>();
        work->handle->Then([&] { ++completed; });
        if (queue.Push(work).ok()) ++accepted;
      }
      --left;
    };
    std::thread taker([&] {
      while (left > 0 || queue.HasNew()) {
        for (const WorkPtr& work : queue.Take()) {
          const WorkPtr resolved = queue.Resolve(work->request.key);
          // Null if the close was quicker; then it has completed the work.
          if (resolved != nullptr) resolved->handle->Complete(Status::Ok());
        }
        std::this_thread::yield();
      }
    });
    std::vector<std::thread> pushers;
    pushers.reserve(kPushers);
    for (int pusher = 0; pusher < kPushers; ++pusher) pushers.emplace_back(push_all, pusher);
    std::thread closer([&] {
      while (accepted < round * 37 % (kPushers * kEach)) std::this_thread::yield();
      queue.Close(Status(StatusCode::kAborted, "closed"));
    });
    for (std::thread& pusher : pushers) pusher.join();
    closer.join();
    taker.join();
    EXPECT_EQ(completed, accepted);
    EXPECT_EQ(queue.pending(), 0U);
  }
}

TEST(TensorQueueThreadsTest, UnnamedCallsOfASetAreOneThreadsUntilItEnds) {
  TensorQueue queue;
  const auto push = [&queue](SetNumber set) {
    auto work = std::make_shared<Work>();
    work->request.key = Key::Unnamed(set, 0);
    return queue.Push(work);
  };
  std::latch pushed(1);
  std::latch refused(1);
  std::thread first([&] {
    EXPECT_TRUE(push(0).ok());
    pushed.count_down();
    refused.wait();
    EXPECT_TRUE(push(0).ok());
  });
  pushed.wait();
  const Status status = push(0);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("second thread"), std::string::npos);
  EXPECT_TRUE(push(1).ok()) << "another set has its own";
  refused.count_down();
  first.join();
  EXPECT_TRUE(push(0).ok());
  std::vector<std::uint64_t> numbers;
  for (const WorkPtr& work : queue.Take()) {
    if (work->request.key.set == 0) numbers.push_back(work->request.key.number);
  }
  EXPECT_THAT(numbers, ElementsAre(0, 1, 2));
}

}  // namespace
}  // namespace sirtaki::core
