// A driver's threads are interleaved in many ways: two that wait, the background thread and one that
// submits without waiting. They may not all sleep while there is something to do.
#include "core/engine/driver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/driver_inl.h"
#include "core/engine/work.h"
#include "tests/support/calling_watcher.h"
#include "tests/support/interleaver.h"
#include "tests/support/test_scale.h"

namespace sirtaki::core {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using tests::InterleavedSync;
using tests::Interleaver;

constexpr std::uint64_t kMostSteps = 200'000;

// Nothing but Wake rings this doorbell.
class FakeBell : public Bell {
 public:
  std::uint64_t ArmDoorbell() override { return Step(), rings_; }
  bool WaitUntil(std::uint64_t ticket, TimePoint deadline) override {
    return Interleaver::Current().SleepUntil([this, ticket] { return rings_ != ticket; }, deadline);
  }
  void Wake() override { Step(), ++rings_; }

 private:
  static void Step() { Interleaver::Current().Step(); }
  std::uint64_t rings_ = 0;
};

// These rounds begin work, which ends by itself some time later.
class FakeRounds : public Rounds {
 public:
  explicit FakeRounds(Bell& bell) : bell_(bell) {}

  HandlePtr Submit(Duration lasts) {
    Interleaver::Current().Step();
    auto handle = std::make_shared<HandleState>(tests::WhenCompleted([this] { bell_.Wake(); }));
    fresh_.push_back({handle, lasts, {}});
    return handle;
  }

  bool Round(TimePoint now, bool waited_for) override {
    EXPECT_FALSE(std::exchange(in_round_, true)) << "two threads make rounds at once";
    Interleaver::Current().Step();
    bool moved = false;
    if (waited_for || !Holds(now)) {
      moved = !fresh_.empty();
      for (Work& work : std::exchange(fresh_, {})) {
        work.ends = now + work.lasts;
        running_.push_back(std::move(work));
      }
      held_until_ = TimePoint::max();
    }
    for (Work& work : std::exchange(running_, {})) {
      if (work.ends > now) {
        running_.push_back(std::move(work));
      } else {
        moved = true;
        work.handle->Complete(Status::Ok());
      }
    }
    in_round_ = false;
    return moved;
  }

  Plan NextRound(TimePoint /*now*/) const override {
    EXPECT_FALSE(in_round_);
    Plan plan;
    plan.outstanding = !running_.empty() || !fresh_.empty();
    plan.holds = held_until_ != TimePoint::max();
    plan.wake = NextEnd();
    if (plan.holds) plan.wake = std::min(plan.wake, held_until_);
    return plan;
  }

  bool Paused() const override { return false; }
  bool HasNew() const override { return Interleaver::Current().Step(), !fresh_.empty(); }
  Status OnStuck() override {
    ADD_FAILURE() << "no round was stuck";
    return Status::Ok();
  }

  // New work waits for more for this long where nobody waits for it.
  Duration hold{};

  // All threads should not sleep over these.
  bool has_unheld() const { return !fresh_.empty() && held_until_ == TimePoint::max(); }
  TimePoint NextDue() const { return std::min(NextEnd(), held_until_); }
  bool in_round() const { return in_round_; }

 private:
  struct Work {
    HandlePtr handle;
    Duration lasts{};
    TimePoint ends{};
  };

  bool Holds(TimePoint now) {
    if (fresh_.empty() || hold <= Duration::zero()) return false;
    if (held_until_ == TimePoint::max()) held_until_ = now + hold;
    return now < held_until_;
  }
  TimePoint NextEnd() const {
    TimePoint next = TimePoint::max();
    for (const Work& work : running_) next = std::min(next, work.ends);
    return next;
  }

  Bell& bell_;
  std::vector<Work> fresh_;
  std::vector<Work> running_;
  TimePoint held_until_ = TimePoint::max();
  bool in_round_ = false;
};

struct DrivenThreads {
  explicit DrivenThreads(std::uint32_t seed) : interleaver(seed) {
    interleaver.all_sleep = [this](TimePoint until) {
      EXPECT_FALSE(rounds.has_unheld()) << "all sleep over new work";
      EXPECT_LE(until, rounds.NextDue()) << "all sleep over the end of work";
      for (const HandleState* handle : waited_for) {
        EXPECT_FALSE(handle->done()) << "a thread sleeps over the end of its wait";
      }
    };
  }

  DriverOptions Options() {
    DriverOptions options;
    options.spin = true;
    options.now = [this] { return interleaver.Now(); };
    return options;
  }

  Duration SomeTime() {
    const Duration times[] = {{}, microseconds(30), microseconds(400), milliseconds(20)};
    return times[interleaver.Choose(4)];
  }

  void Wait(const HandlePtr& handle, TimePoint deadline = TimePoint::max()) {
    waited_for.push_back(handle.get());
    driver->DriveUntil([&handle] { return Interleaver::Current().Step(), handle->done(); },
                       handle.get(), deadline);
    std::erase(waited_for, handle.get());
  }

  // The thread waits for its calls, and gives up some waits: others have to end that work.
  void WaitForCalls() {
    std::vector<HandlePtr> given_up;
    for (int call = 0; call < 3; ++call) {
      const HandlePtr handle = rounds.Submit(SomeTime());
      if (interleaver.Choose(3) == 0) {
        given_up.push_back(handle);
        Wait(handle, interleaver.Now() + microseconds(100 * interleaver.Choose(4)));
        if (interleaver.Choose(2) == 0) DoSomethingElse();
      } else {
        Wait(handle);
        EXPECT_TRUE(handle->done());
      }
    }
    LookForEnds(given_up);
  }

  void DoSomethingElse() {
    interleaver.SleepUntil([] { return false; }, interleaver.Now() + SomeTime());
  }

  // The thread polls its handles, as a program does that drives nothing.
  void LookForEnds(const std::vector<HandlePtr>& handles) {
    for (const HandlePtr& handle : handles) {
      interleaver.SleepUntil([&handle] { return handle->done(); }, TimePoint::max());
    }
  }

  void SubmitWithoutWaiting() {
    std::vector<HandlePtr> handles;
    for (int call = 0; call < 4; ++call) {
      handles.push_back(rounds.Submit(SomeTime()));
      if (!driver->ComesBackForNewWork()) driver->WakeSomebody();
      if (interleaver.Choose(3) == 0) {
        driver->WhileNobodyDrives([this] { EXPECT_FALSE(rounds.in_round()); });
      }
      if (interleaver.Choose(3) == 0) DoSomethingElse();
    }
    LookForEnds(handles);
  }

  // Runs all threads; false: they did not end. Expectations show the rest.
  bool Run(Duration hold) {
    rounds.hold = hold;
    driver = std::make_unique<BasicDriver<InterleavedSync>>(Options(), token, bell, rounds);
    int busy = 3;
    const auto body = [this, &busy](void (DrivenThreads::*what)()) {
      return [this, &busy, what] {
        (this->*what)();
        if (--busy == 0) driver->StopThread();
      };
    };
    interleaver.Add([this] { driver->RunThread(); });
    interleaver.Add(body(&DrivenThreads::WaitForCalls));
    interleaver.Add(body(&DrivenThreads::WaitForCalls));
    interleaver.Add(body(&DrivenThreads::SubmitWithoutWaiting));
    return interleaver.Run(kMostSteps);
  }

  Interleaver interleaver;
  FakeBell bell;
  FakeRounds rounds{bell};
  InterleavedSync::Mutex token;
  std::unique_ptr<BasicDriver<InterleavedSync>> driver;
  std::vector<const HandleState*> waited_for;
};

class DriverTest : public ::testing::TestWithParam<Duration> {};

TEST_P(DriverTest, NobodySleepsOverWorkHoweverTheThreadsInterleave) {
  const auto first = static_cast<std::uint32_t>(tests::TestSeed());
  const int runs = tests::ScaledCount(200, 5000);
  for (int run = 0; run < runs && !HasFailure(); ++run) {
    const std::uint32_t seed = first + static_cast<std::uint32_t>(run);
    auto threads = std::make_unique<DrivenThreads>(seed);
    if (!threads->Run(GetParam())) {
      ADD_FAILURE() << "the threads do not end";
      static_cast<void>(threads.release());  // threads are left in it
    }
    if (HasFailure()) ADD_FAILURE() << "seed " << seed;  // other threads have failed
  }
}

INSTANTIATE_TEST_SUITE_P(Holds, DriverTest,
                         ::testing::Values(Duration::zero(), Duration(microseconds(50))),
                         [](const auto& made) {
                           return made.param == Duration::zero() ? "Never" : "Briefly";
                         });

}  // namespace
}  // namespace sirtaki::core
