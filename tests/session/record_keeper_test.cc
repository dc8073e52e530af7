#include "session/record_keeper.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>

#include "core/base/check.h"
#include "core/base/types.h"
#include "tests/support/within.h"

namespace sirtaki::session {
namespace {

using core::Clock;
using std::chrono::seconds;

std::atomic<int> former_calls{0};
void Former(int /*signal*/) { ++former_calls; }

// Appends what is written to a file that outlives the process.
class RecordKeeperTest : public testing::Test {
 protected:
  RecordKeeperTest() {
    std::string path = testing::TempDir() + "record_keeper.XXXXXX";
    close(mkstemp(path.data()));
    path_ = path;
  }
  ~RecordKeeperTest() override { unlink(path_.c_str()); }

  RecordKeeper::Write Writer(const std::string& name) {
    return [this, name](const std::string& why) {
      std::ofstream(path_, std::ios::app) << name << ": " << why << "\n";
      ++written_;
    };
  }
  std::string Text() const {
    std::ifstream file(path_);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }
  // How a child ends that does this.
  static int EndOf(const std::function<void()>& body) {
    const pid_t child = fork();
    if (child == 0) {
      body();
      _exit(77);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return status;
  }

  std::string path_;
  std::atomic<int> written_{0};
};

TEST_F(RecordKeeperTest, WhatIsAskedForIsWritten) {
  const auto first = RecordKeeper::Register(Writer("first"));
  const auto second = RecordKeeper::Register(Writer("second"));
  second->Ask("a fault");
  ASSERT_TRUE(tests::Within(seconds(30), [this] { return written_ == 1; }));
  EXPECT_EQ(Text(), "second: a fault\n");
}

TEST_F(RecordKeeperTest, TheEndWritesWhatIsStillAskedForAndNothingAfter) {
  const auto keeper = RecordKeeper::Register(Writer("rank"));
  keeper->Ask("a fault");
  EXPECT_TRUE(keeper->End());
  EXPECT_EQ(Text(), "rank: a fault\n");
  keeper->Ask("another");
  EXPECT_TRUE(keeper->End());
  EXPECT_EQ(Text(), "rank: a fault\n");
}

TEST_F(RecordKeeperTest, AWriteThatHangsIsLeftBehindAndTheNextAreWrittenWhenItIsOver) {
  std::atomic<bool> hangs{true};
  std::atomic<bool> began{false};
  const auto stuck = RecordKeeper::Register(
      [&](const std::string& /*why*/) {
        began = true;
        ASSERT_TRUE(tests::Within(seconds(30), [&] { return !hangs; }));
        ++written_;
      },
      std::chrono::milliseconds(1));
  stuck->Ask("a fault");
  ASSERT_TRUE(tests::Within(seconds(30), [&] { return began.load(); }));
  EXPECT_FALSE(stuck->End());
  EXPECT_EQ(written_, 0);
  stuck->Ask("another");  // of one that has ended
  const auto next = RecordKeeper::Register(Writer("next"));
  next->Ask("a fault");
  hangs = false;
  EXPECT_TRUE(next->End());
  EXPECT_EQ(written_, 2);
  EXPECT_EQ(Text(), "next: a fault\n");
  const auto last = RecordKeeper::Register(Writer("last"));
  ASSERT_EQ(raise(SIGUSR1), 0);
  ASSERT_TRUE(tests::Within(seconds(30), [this] { return written_ == 3; }));
  EXPECT_EQ(Text(), "next: a fault\nlast: SIGUSR1\n");
}

TEST_F(RecordKeeperTest, ASignalAsksForAllRecordsAndGoesOnToTheFormerHandler) {
  former_calls = 0;
  struct sigaction former {};
  former.sa_handler = &Former;
  struct sigaction before {};
  sigaction(SIGUSR1, &former, &before);
  {
    const auto first = RecordKeeper::Register(Writer("first"));
    const auto second = RecordKeeper::Register(Writer("second"));
    ASSERT_EQ(raise(SIGUSR1), 0);
    EXPECT_EQ(former_calls, 1);
    ASSERT_TRUE(tests::Within(seconds(30), [this] { return written_ == 2; }));
    EXPECT_EQ(Text(), "first: SIGUSR1\nsecond: SIGUSR1\n");
  }
  struct sigaction after {};
  sigaction(SIGUSR1, &before, &after);
  EXPECT_EQ(after.sa_handler, &Former);  // it is there again
}

TEST_F(RecordKeeperTest, AFormerHandlerForOneSignalIsCalledOnce) {
  former_calls = 0;
  const int status = EndOf([this] {
    struct sigaction former {};
    former.sa_handler = &Former;
    former.sa_flags = SA_RESETHAND;
    sigaction(SIGTERM, &former, nullptr);
    const auto keeper = RecordKeeper::Register(Writer("rank"));
    (void)raise(SIGTERM);
    if (former_calls != 1) _exit(1);
    (void)raise(SIGTERM);  // ends the process
  });
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
}

// A program may count on EINTR.
TEST_F(RecordKeeperTest, ACallThatTheFormerHandlerMayInterruptStillIs) {
  const int status = EndOf([this] {
    struct sigaction former {};
    former.sa_handler = &Former;
    sigaction(SIGUSR1, &former, nullptr);
    const auto keeper = RecordKeeper::Register(Writer("rank"));
    int ends[2];
    if (pipe(ends) != 0) _exit(1);
    const pthread_t reader = pthread_self();
    std::thread signaller([reader] {
      for (int i = 0; i < 1000; ++i) {
        pthread_kill(reader, SIGUSR1);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      _exit(2);
    });
    char letter = 0;
    const ssize_t got = read(ends[0], &letter, 1);
    _exit(got < 0 && errno == EINTR ? 0 : 3);
  });
  ASSERT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(RecordKeeperTest, AHandlerThatTheProgramSetsLaterStays) {
  former_calls = 0;
  struct sigaction before {};
  {
    const auto keeper = RecordKeeper::Register(Writer("rank"));
    struct sigaction later {};
    later.sa_handler = &Former;
    sigaction(SIGTERM, &later, &before);
  }
  ASSERT_EQ(raise(SIGTERM), 0);
  EXPECT_EQ(former_calls, 1);
  EXPECT_EQ(written_, 0);
  // Nor is it overruled by the next session, to which it may go on.
  const auto keeper = RecordKeeper::Register(Writer("rank"));
  ASSERT_EQ(raise(SIGTERM), 0);
  EXPECT_EQ(former_calls, 2);
  before.sa_handler = SIG_DFL;
  before.sa_flags = 0;
  sigaction(SIGTERM, &before, nullptr);
}

TEST_F(RecordKeeperTest, SigtermEndsTheProcessOnceTheRecordsAreThere) {
  const int status = EndOf([this] {
    const auto keeper = RecordKeeper::Register(Writer("rank"));
    (void)raise(SIGTERM);
  });
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
  EXPECT_EQ(Text(), "rank: SIGTERM\n");
}

TEST_F(RecordKeeperTest, ABrokenCheckAndAnExceptionThatNobodyCatchesLeaveRecords) {
  for (const bool check : {true, false}) {
    const int status = EndOf([this, check] {
      if (freopen("/dev/null", "w", stderr) == nullptr) _exit(76);
      const auto keeper = RecordKeeper::Register(Writer(check ? "check" : "exception"));
      if (check) SIRTAKI_CHECK(check == false, "for the test");
      std::thread([] { throw 1; }).join();
    });
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
    EXPECT_EQ(WTERMSIG(status), SIGABRT);
  }
  EXPECT_EQ(Text(), "check: SIGABRT\nexception: SIGABRT\n");
}

TEST_F(RecordKeeperTest, AWriterThatIsStuckDoesNotKeepTheProcessFromEnding) {
  const int status = EndOf([] {
    const auto keeper = RecordKeeper::Register([](const std::string&) {
      for (;;) pause();
    });
    (void)raise(SIGTERM);
  });
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
}

TEST_F(RecordKeeperTest, AForkedChildWritesNothingAndOnlySigusr1DoesNotEndIt) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer keeps signals from the child of a process with several threads";
#endif
  const auto keeper = RecordKeeper::Register(Writer("rank"));
  const int status = EndOf([] { (void)raise(SIGTERM); });
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
  const int asked = EndOf([] { (void)raise(SIGUSR1); });
  EXPECT_TRUE(WIFEXITED(asked) && WEXITSTATUS(asked) == 77) << asked;
  EXPECT_TRUE(keeper->End());
  EXPECT_EQ(Text(), "");
}

}  // namespace
}  // namespace sirtaki::session
