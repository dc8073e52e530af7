#include "launch/base/run_commands.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <memory>
#include <utility>

#include "launch/base/signal_pipe.h"

namespace sirtaki::launch {

using core::Clock;
using core::TimePoint;

namespace {

constexpr std::size_t kMostKept = std::size_t{64} * 1024;

class Runner {
 public:
  Runner(std::vector<Command> commands, core::Duration patience, std::size_t at_once)
      : commands_(std::move(commands)),
        patience_(patience),
        at_once_(at_once),
        outcomes_(commands_.size()) {}

  std::vector<CommandOutcome> Run(int* signal) {
    *signal = 0;
    if (const core::Status status = SignalPipe::Open(); !status.ok()) {
      for (CommandOutcome& outcome : outcomes_) outcome.why = status.message();
      return std::move(outcomes_);
    }
    while (Begin() || !running_.empty()) Step();
    if (signal_ != 0) SignalPipe::Take();  // one tells enough
    SignalPipe::Close();
    *signal = signal_;
    return std::move(outcomes_);
  }

 private:
  struct Running {
    Child child;
    CommandOutcome* outcome = nullptr;
    TimePoint until;
    bool killed = false;
  };

  // Starts what may start now. False if nothing is left to be started.
  bool Begin() {
    while (next_ < commands_.size() && running_.size() < at_once_ && signal_ == 0) {
      auto one = std::make_unique<Running>();
      one->outcome = &outcomes_[next_];
      one->until = Clock::now() + patience_;
      commands_[next_].pipes = true;
      commands_[next_].own_group = true;  // Ctrl-C is for us
      int error = 0;
      const core::Status status = one->child.Start(commands_[next_++], &error);
      if (status.ok()) {
        running_.push_back(std::move(one));
      } else {
        outcomes_[next_ - 1].why = status.message();
      }
    }
    return next_ < commands_.size() && signal_ == 0;
  }

  void Step() {
    if (running_.empty()) return;
    std::vector<pollfd> fds = {{SignalPipe::fd(), POLLIN, 0}};
    TimePoint until = TimePoint::max();
    for (const auto& one : running_) {
      fds.push_back({one->child.output().get(), POLLIN, 0});
      fds.push_back({one->child.error().get(), POLLIN, 0});
      if (!one->killed) until = std::min(until, one->until);
    }
    poll(fds.data(), fds.size(), Patience(until));
    for (std::size_t i = 0; i < running_.size(); ++i) {
      if (fds[2 * i + 1].revents != 0) TakeOutput(running_[i].get());
      if (fds[2 * i + 2].revents != 0) TakeError(running_[i].get());
    }
    for (const int signal : SignalPipe::Take()) {
      if (signal != SIGCHLD) signal_ = signal;
    }
    for (const auto& one : running_) CheckEnd(one.get());
    std::erase_if(running_, [](const auto& one) { return !one->child.running(); });
  }

  static int Patience(TimePoint until) {
    if (until == TimePoint::max()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
  }

  // False if there is nothing to be read now.
  static bool Take(const Descriptor& from, std::string* into, bool* ended) {
    if (!from.valid()) return false;
    std::string bytes;
    const Transfer transfer = ReadSome(from.get(), &bytes);
    into->append(bytes, 0, kMostKept - into->size());
    *ended = transfer.ended;
    return transfer.bytes > 0;
  }

  static bool TakeOutput(Running* one) {
    bool ended = false;
    const bool some = Take(one->child.output(), &one->outcome->output, &ended);
    if (ended) one->child.CloseOutput();
    return some;
  }
  static bool TakeError(Running* one) {
    bool ended = false;
    const bool some = Take(one->child.error(), &one->outcome->error, &ended);
    if (ended) one->child.CloseError();
    return some;
  }

  void CheckEnd(Running* one) const {
    if (const auto end = one->child.Ended()) {
      // What it has left running may hold the pipes open, as ssh does that serves later calls.
      while (one->outcome->output.size() < kMostKept && TakeOutput(one)) continue;
      while (one->outcome->error.size() < kMostKept && TakeError(one)) continue;
      one->outcome->in_time = !one->killed;
      one->outcome->end = *end;
    } else if (!one->killed && (signal_ != 0 || Clock::now() >= one->until)) {
      one->child.SignalGroup(SIGKILL);
      one->killed = true;
    }
  }

  std::vector<Command> commands_;
  const core::Duration patience_;
  const std::size_t at_once_;
  std::vector<CommandOutcome> outcomes_;
  std::vector<std::unique_ptr<Running>> running_;
  std::size_t next_ = 0;
  int signal_ = 0;
};

}  // namespace

std::vector<CommandOutcome> RunCommands(std::vector<Command> commands, core::Duration patience,
                                        std::size_t at_once, int* signal) {
  return Runner(std::move(commands), patience, at_once).Run(signal);
}

}  // namespace sirtaki::launch
