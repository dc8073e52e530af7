// A thread that may be stuck ends in one of three ways: joined, waited for, or left behind.
#include "core/threads/leavable_thread.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <latch>
#include <memory>

#include "core/threads/quiet_thread.h"

namespace sirtaki::core {
namespace {

using std::chrono::hours;

constexpr Duration kGrace = std::chrono::milliseconds(100);

// Waits until it is told to end, then does `last`.
void StartWaiting(const std::shared_ptr<LeavableThread>& thread,
                  const std::function<void()>& last) {
  thread->StartThread([thread, last] {
    {
      MutexLock lock(thread->mutex);
      while (!thread->quits()) thread->WaitUntil(TimePoint::max());
    }
    last();
  });
}

// A program's handler writes where its process crashed.
TEST(QuietThreadTest, SignalsAreLeftToOtherThreadsUnlessTheyAreItsOwnFaults) {
  StartQuietThread([] {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    for (const int signal : {SIGTERM, SIGINT, SIGUSR1, SIGCHLD}) {
      EXPECT_EQ(sigismember(&blocked, signal), 1) << signal;
    }
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) {
      EXPECT_EQ(sigismember(&blocked, fault), 0) << fault;
    }
  }).join();
}

TEST(LeavableThreadTest, AThreadThatWaitsIsJoined) {
  const auto thread = std::make_shared<LeavableThread>();
  bool ended = false;
  StartWaiting(thread, [&] { ended = true; });
  EXPECT_TRUE(thread->EndThread(hours(1)));
  EXPECT_TRUE(ended);
}

TEST(LeavableThreadTest, ACallOutIsWaitedFor) {
  const auto thread = std::make_shared<LeavableThread>();
  std::latch called(1);
  bool told = false;
  thread->StartThread([&, thread] {
    told = thread->CallOut([&] {
      called.count_down();
      MutexLock lock(thread->mutex);
      while (!thread->quits()) thread->changed.Wait(thread->mutex);
      thread->changed.WaitUntil(thread->mutex,
                                Clock::now() + kGrace + kGrace);  // outlasts it
    });
  });
  called.wait();
  EXPECT_TRUE(thread->EndThread(kGrace));
  EXPECT_TRUE(told);
}

TEST(LeavableThreadTest, AThreadThatIsStuckIsLeftBehindAndCallsNothingAnyMore) {
  struct Shared {
    LeavableThread thread;
    std::latch at_work{1};
    std::latch released{1};
    std::latch over{1};
    bool called = false;
    bool told = true;
  };
  const auto shared = std::make_shared<Shared>();
  shared->thread.StartThread([shared] {
    shared->at_work.count_down();
    shared->released.wait();
    shared->told = shared->thread.CallOut([shared] { shared->called = true; });
    shared->over.count_down();
  });
  shared->at_work.wait();
  EXPECT_FALSE(shared->thread.EndThread(Duration::zero()));
  shared->released.count_down();
  shared->over.wait();
  EXPECT_FALSE(shared->told);
  EXPECT_FALSE(shared->called);
}

// It could not be stuck while it waited; what it then does can.
TEST(LeavableThreadTest, AThreadThatGetsStuckAfterItWasToldToEndIsLeftBehind) {
  const auto thread = std::make_shared<LeavableThread>();
  const auto released = std::make_shared<std::latch>(1);
  StartWaiting(thread, [released] { released->wait(); });
  EXPECT_FALSE(thread->EndThread(std::chrono::milliseconds(1)));
  released->count_down();
}

}  // namespace
}  // namespace sirtaki::core
