// What handles do when their engine has ended, or is another process's.
#include "core/engine/handle_hooks.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>

namespace sirtaki::core {
namespace {

// Whoever rings waits until he is let go.
class StuckBell final : public Transport {
 public:
  void Send(int /*rank*/, Bytes /*bytes*/) override {}
  std::optional<Incoming> TryReceive() override { return std::nullopt; }
  bool Flush() override { return true; }
  Status health() const override { return Status::Ok(); }
  std::uint64_t ArmDoorbell() override { return 0; }
  bool WaitUntil(std::uint64_t /*ticket*/, TimePoint /*deadline*/) override { return true; }
  bool ArrivalsRing() const override { return true; }

  void Wake() override {
    rings_ = rings_ + 1;
    rings_.notify_all();
    stuck_.wait(true);
  }
  void AwaitRing() { rings_.wait(0); }
  void LetGo() {
    stuck_ = false;
    stuck_.notify_all();
  }
  int rings() const { return rings_; }

 private:
  std::atomic<int> rings_{0};
  std::atomic<bool> stuck_{true};
};

TEST(HandleHooksTest, InAForkedChildNoLockOfTheParentIsTaken) {
  StuckBell bell;
  TensorQueue queue;
  const auto hooks = std::make_shared<HandleHooks>(&bell, &queue);
  auto first = HandleHooks::MakeHandle(hooks, Key::Named(kWorldSet, "first"));
  auto second = HandleHooks::MakeHandle(hooks, Key::Named(kWorldSet, "second"));
  first->BeginWait();
  second->BeginWait();
  std::thread ringer([&] { first->Complete(Status::Ok()); });
  bell.AwaitRing();  // the ringer holds the lock

  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // ends it if it hangs
    second->Complete(Status::Ok());
    second->Observe();
    _exit(bell.rings() == 1 ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  bell.LetGo();
  ringer.join();
  second->Complete(Status::Ok());
  EXPECT_EQ(bell.rings(), 2);
  hooks->Detach();
}

}  // namespace
}  // namespace sirtaki::core
