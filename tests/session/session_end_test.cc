// The end of a session waits for a call that another thread has under way, and costs no time of a
// core meanwhile; it does not wait for one that is stuck.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "session/base/devices.h"
#include "session/inproc/inproc_world.h"
#include "session/session.h"
#include "tests/support/rank_threads.h"
#include "tests/support/session_calls.h"
#include "tests/support/within.h"

namespace sirtaki::session {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// How often the calling thread has slept or yielded in `call`.
std::int64_t NapsIn(const std::function<void()>& call) {
  const auto naps = [] {
    rusage used{};
    getrusage(RUSAGE_THREAD, &used);
    return static_cast<std::int64_t>(used.ru_nvcsw) + used.ru_nivcsw;
  };
  const std::int64_t before = naps();
  call();
  return naps() - before;
}

// A session of one rank whose only call is held where it completes its handle.
class SessionEndTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto status = Session::CreateInproc(std::make_shared<InprocWorld>(1), 0,
                                              tests::SessionOptions(), &session_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    vector_.work().handle = std::make_shared<core::HandleState>();
    vector_.work().handle->Then([this] {
      inside_.count_down();
      open_.wait();
    });
    caller_ = std::thread([this] { static_cast<void>(vector_.Submit(*session_)); });
    inside_.wait();
  }
  void TearDown() override { caller_.join(); }

  std::shared_ptr<Session> session_;
  tests::Vector vector_{core::OpKind::kAllReduce, "held", {1.0F}};
  std::latch inside_{1};
  std::latch open_{1};
  std::thread caller_;
};

TEST_F(SessionEndTest, AShutdownSleepsWhileACallIsUnderWay) {
  std::int64_t naps = 0;
  std::thread ends([&] { naps = NapsIn([&] { EXPECT_TRUE(session_->Shutdown("done").ok()); }); });
  EXPECT_TRUE(tests::Within(seconds(60), [&] { return !session_->is_alive(); }));
  // A loop comes round thousands of times meanwhile, and a busy machine makes that fewer.
  std::this_thread::sleep_for(milliseconds(300));
  open_.count_down();
  ends.join();
  EXPECT_LT(naps, 100);
}

// A copy of this throws once it is armed.
struct ThrowsWhenCopied {
  explicit ThrowsWhenCopied(std::shared_ptr<bool> when) : armed(std::move(when)) {}
  ThrowsWhenCopied(const ThrowsWhenCopied& other) : armed(other.armed) {
    if (*armed) throw std::runtime_error("no thread is left");
  }
  ThrowsWhenCopied& operator=(const ThrowsWhenCopied&) = delete;
  template <typename... Arguments>
  core::Status operator()(Arguments&&...) const {
    return core::Status::Ok();
  }
  std::shared_ptr<bool> armed;
};

// A session whose start has thrown has no part in its job: it neither leaves it nor says good-bye. The
// others hear of it at once.
TEST(SessionStartTest, AnExceptionInAStartIsItsError) {
  for (const auto& [has_lanes, on_all] :
       {std::pair{false, true}, std::pair{true, true}, std::pair{true, false}}) {
    const auto world = std::make_shared<InprocWorld>(2);
    const auto armed = std::make_shared<bool>(false);
    auto options = tests::SessionOptions();
    if (has_lanes) {
      options.on_start = ThrowsWhenCopied(armed);
    } else {
      options.gpus =
          std::make_shared<const GpuLibraries>(GpuLibraries{.load_nccl = ThrowsWhenCopied(armed)});
    }
    *armed = true;
    tests::RankThreads::Run(2, [&](int rank) {
      std::shared_ptr<Session> session;
      const StartOptions others = tests::SessionOptions();
      const StartOptions& mine = on_all || rank == 0 ? std::as_const(options) : others;
      const core::Status status = Session::CreateInproc(world, rank, mine, &session);
      EXPECT_EQ(status.code(), core::StatusCode::kBackend) << status.ToString();
      const bool hears = !on_all && rank != 0;
      EXPECT_EQ(status.message(),
                hears ? "rank 0 cannot start: no thread is left" : "no thread is left");
      EXPECT_EQ(session, nullptr);
    });
    *armed = false;
  }
}

// No such handle is left by a session; a wait for one must end all the same, and must not keep the
// session's parts.
TEST(SessionWaitTest, AHandleThatTheEndHasNotCompletedIsAnError) {
  for (const int size : {1, 2}) {
    const auto world = std::make_shared<InprocWorld>(size);
    tests::RankThreads::Run(size, [&](int rank) {
      std::shared_ptr<Session> session;
      ASSERT_TRUE(Session::CreateInproc(world, rank, tests::SessionOptions(), &session).ok());
      ASSERT_TRUE(session->Shutdown("done").ok());
      core::HandleState handle(nullptr, core::Key::Named(core::kWorldSet, "w"));
      const core::Status status = session->Wait(handle);
      EXPECT_EQ(status.code(), core::StatusCode::kNotInitialized);
      EXPECT_EQ(status.message(), "\"w\" has not ended, and the session that it was given to has");
    });
  }
}

// Only an engine in whose round a call has lasted for 10 s is stuck. Its thread goes on when the call
// returns, long after the session has ended, with all that it uses.
TEST(SessionStuckTest, AShutdownLeavesAStuckEngineBehind) {
  constexpr int kSize = 2;
  const auto world = std::make_shared<InprocWorld>(kSize);
  std::latch inside{1};
  std::latch open{1};
  tests::RankThreads::Run(kSize, [&](int rank) {
    core::Status status;
    std::shared_ptr<Session> session;
    auto options = tests::SessionOptions([](auto& config) { config.peer_timeout = seconds(3); });
    if (rank == 0) {
      options.on_start = [&](const core::RunBatch&) {
        inside.count_down();
        open.wait();
      };
    }
    status = Session::CreateInproc(world, rank, options, &session);
    ASSERT_TRUE(status.ok()) << status.ToString();
    auto vector =
        std::make_unique<tests::Vector>(core::OpKind::kAllReduce, "held", std::vector<float>{1});
    ASSERT_TRUE(vector->Submit(*session).ok());
    if (rank == 0) inside.wait();  // by the engine's own thread: this one must not make that round
    const core::HandlePtr handle = vector->work().handle;
    if (rank == 0) {  // what the stuck call has in hand is not waited for
      EXPECT_EQ(session->Wait(*handle).code(), core::StatusCode::kBackend);
    }
    status = session->Shutdown("done");
    if (rank != 0) {
      EXPECT_EQ(status.code(), core::StatusCode::kPeerLost) << status.ToString();
      EXPECT_TRUE(handle->done());
      return;
    }
    EXPECT_EQ(status.code(), core::StatusCode::kBackend) << status.ToString();
    EXPECT_NE(status.message().find("has been stuck in one call for 10 s"), std::string::npos)
        << status.message();
    EXPECT_EQ(session->Wait(*handle), status) << "also after the end";
    session.reset();
    const std::weak_ptr<void> memory = vector->work().keep_alive;
    vector.reset();
    EXPECT_FALSE(memory.expired()) << "the round that is stuck has it";
    open.count_down();
    EXPECT_TRUE(tests::Within(seconds(60), [&] { return handle->done() && memory.expired(); }));
    EXPECT_EQ(handle->status().code(), core::StatusCode::kBackend);
  });
}

}  // namespace
}  // namespace sirtaki::session
