#include "launch/base/loop.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace sirtaki::launch {
namespace {

using core::Clock;
using core::Status;
using std::chrono::seconds;

// Whether it comes true.
bool Await(Loop* loop, const std::function<bool()>& condition) {
  const auto deadline = Clock::now() + seconds(60);
  while (!condition() && Clock::now() < deadline) loop->Run(deadline);
  return condition();
}

// The descriptors of this process.
std::vector<int> Descriptors() {
  std::vector<int> all;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    all.push_back(std::stoi(entry.path().filename().string()));
  }
  return all;
}

class PipeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::array<int, 2> ends{};
    ASSERT_EQ(pipe2(ends.data(), O_CLOEXEC), 0);
    source_.Open(Descriptor(ends[0]));
    writer_ = Descriptor(ends[1]);
  }

  Loop loop_;
  int called_ = 0;
  Source source_{&loop_, [this] { ++called_; }};
  Descriptor writer_;
};

TEST_F(PipeTest, ASourceIsCalledOnceForEachTimeThatItIsAsked) {
  source_.Ask();
  source_.Ask();
  WriteSome(writer_.get(), "x");
  EXPECT_TRUE(Await(&loop_, [this] { return called_ == 1; }));
  loop_.Run(Clock::now() + std::chrono::milliseconds(1));
  EXPECT_EQ(called_, 1);  // what it can be read for is still there
  source_.Ask();
  EXPECT_TRUE(Await(&loop_, [this] { return called_ == 2; }));
}

TEST_F(PipeTest, ASourceThatIsClosedIsNotCalled) {
  source_.Ask();
  WriteSome(writer_.get(), "x");
  source_.Close();
  source_.Ask();
  loop_.Run(Clock::now() + std::chrono::milliseconds(1));
  EXPECT_EQ(called_, 0);
}

// Two ends of a connection.
class LinkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int port = 0;
    const auto take = [this](std::optional<Link> link) { here_ = *std::move(link); };
    ASSERT_TRUE(loop_.Listen(/*local=*/true, take, &port).ok());
    bool connected = false;
    there_.Connect(&loop_, "127.0.0.1:" + std::to_string(port),
                   [&](const Status& why) { connected = why.ok(); });
    ASSERT_TRUE(Await(&loop_, [&] { return connected && here_.is_open(); }));
  }

  void Hear() {
    here_.Hear(
        [this](const RankMessage& message) {
          if (const auto* output = std::get_if<OutputMessage>(&message)) heard_ += output->bytes;
          return true;
        },
        [this](const Status& why) { end_ = why; });
  }

  Loop loop_;
  Link here_;
  Link there_;
  std::string heard_;
  std::optional<Status> end_;
};

TEST_F(LinkTest, MessagesArriveAndThenTheEnd) {
  here_.Trust();
  Hear();
  EXPECT_EQ(here_.other_address(), "127.0.0.1");
  EXPECT_EQ(there_.own_end().substr(0, 10), "127.0.0.1:");
  // More than a system takes in unread.
  const std::string bytes(kMaxOutputBytes, 'x');
  constexpr std::size_t kCount = 1000;
  for (std::size_t i = 0; i < kCount; ++i) {
    there_.Send(Encode(OutputMessage{Stream::kOutput, bytes}));
  }
  EXPECT_FALSE(there_.has_sent_all());
  EXPECT_TRUE(Await(&loop_, [this] { return there_.has_sent_all(); }));
  there_.EndSending();
  EXPECT_TRUE(Await(&loop_, [this] { return end_.has_value(); }));
  EXPECT_EQ(heard_.size(), kCount * kMaxOutputBytes);
  EXPECT_TRUE(end_->ok()) << end_->message();
  EXPECT_FALSE(here_.is_open());
  EXPECT_EQ(here_.own_end(), "");
}

TEST_F(LinkTest, LongMessagesAreHeardOnlyFromOneThatIsTrusted) {
  Hear();
  there_.Send(Encode(OutputMessage{Stream::kOutput, std::string(kMaxGreeting, 'x')}));
  EXPECT_TRUE(Await(&loop_, [this] { return end_.has_value(); }));
  EXPECT_EQ(end_->code(), core::StatusCode::kProtocol);
  EXPECT_EQ(heard_, "");
}

TEST_F(LinkTest, TheEndIsNotToldOfALinkThatWasClosedHere) {
  Hear();
  here_.Close();
  there_.Send(Encode(StopMessage{}));
  loop_.Run(Clock::now() + std::chrono::milliseconds(1));
  EXPECT_FALSE(end_);
}

TEST_F(LinkTest, ChildrenInheritNothing) {
  for (const int fd : Descriptors()) {
    const int flags = fcntl(fd, F_GETFD);
    if (fd <= STDERR_FILENO || flags < 0) continue;
    const auto path = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd));
    const bool ours = path.string().starts_with("socket:") || path.string().starts_with("anon_");
    EXPECT_TRUE(!ours || (flags & FD_CLOEXEC) != 0) << fd << ": " << path;
  }
}

// A scheduler tells a job by SIGUSR1 that its time is nearly over, and ends it by SIGTERM later.
TEST(LoopTest, ASignalThatComesTooLateEndsTheProcessThoughAnotherOneWasTaken) {
  const auto end_late = [] {
    std::optional<Loop> loop(std::in_place);
    loop->TakeSignals(Loop::UserSignals::kTaken, [](int) {});
    raise(SIGUSR1);
    loop->Run(core::TimePoint());
    raise(SIGTERM);
    loop.reset();
    _exit(0);
  };
  EXPECT_EXIT(end_late(), testing::KilledBySignal(SIGTERM), "");
}

TEST(LoopTest, AConnectionThatCameBeforeTheEndIsNotHandedOver) {
  int port = 0;
  int handed = 0;
  Loop others;
  Link stranger;
  {
    Loop loop;
    ASSERT_TRUE(loop.Listen(
                        true, [&](std::optional<Link>) { ++handed; }, &port)
                    .ok());
    bool connected = false;
    stranger.Connect(&others, "127.0.0.1:" + std::to_string(port),
                     [&](const core::Status&) { connected = true; });
    EXPECT_TRUE(Await(&others, [&] { return connected; }));
  }
  EXPECT_EQ(handed, 0);
}

TEST(LoopTest, SignalsAreTakenInTheLoop) {
  Loop loop;
  std::vector<int> taken;
  loop.TakeSignals(Loop::UserSignals::kTaken, [&](int signal) { taken.push_back(signal); });
  for (const int signal : {SIGTERM, SIGUSR1, SIGCHLD}) raise(signal);
  EXPECT_TRUE(Await(&loop, [&] { return taken.size() == 3; }));
  EXPECT_EQ(taken, (std::vector<int>{SIGTERM, SIGUSR1, SIGCHLD}));
}

TEST(LoopTest, SignalsOfUsersDoNothingWhereTheyAreIgnored) {
  Loop loop;
  std::vector<int> taken;
  loop.TakeSignals(Loop::UserSignals::kIgnored, [&](int signal) { taken.push_back(signal); });
  for (const int signal : {SIGUSR1, SIGUSR2, SIGINT}) raise(signal);
  EXPECT_TRUE(Await(&loop, [&] { return !taken.empty(); }));
  EXPECT_EQ(taken, (std::vector<int>{SIGINT}));
}

TEST(LoopTest, AHangupThatIsIgnoredStaysIgnored) {
  const auto before = std::signal(SIGHUP, SIG_IGN);
  {
    Loop loop;
    loop.TakeSignals(Loop::UserSignals::kIgnored, [](int) {});
    EXPECT_EQ(std::signal(SIGHUP, SIG_IGN), SIG_IGN);
  }
  std::signal(SIGHUP, before);
}

TEST(LoopTest, ASignalThatCameTooLateEndsTheProcess) {
  const auto end = [] {
    Loop loop;
    loop.TakeSignals(Loop::UserSignals::kIgnored, [](int) {});
    raise(SIGTERM);
  };
  EXPECT_EXIT(end(), testing::KilledBySignal(SIGTERM), "");
}

TEST(LoopTest, ASecondSignalThatCameTooLateDoesNot) {
  Loop loop;
  bool taken = false;
  loop.TakeSignals(Loop::UserSignals::kIgnored, [&](int) { taken = true; });
  raise(SIGTERM);
  EXPECT_TRUE(Await(&loop, [&] { return taken; }));
  raise(SIGTERM);
}

TEST(LoopTest, AFreePortCanBeListenedOn) { EXPECT_GT(FreePort(), 0); }

}  // namespace
}  // namespace sirtaki::launch
