#include "launch/base/run_commands.h"

#include <algorithm>
#include <csignal>
#include <memory>
#include <utility>

#include "launch/base/loop.h"

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
    loop_.TakeSignals(Loop::UserSignals::kIgnored, [this](int came) {
      if (came != SIGCHLD) signal_ = came;
    });
    while (Begin() || !running_.empty()) Step();
    *signal = signal_;
    return std::move(outcomes_);
  }

 private:
  struct Running {
    Running(Loop* loop, CommandOutcome* into, TimePoint time)
        : outcome(into), child(loop, [this](Stream stream) { Take(stream); }), until(time) {}

    // False if there is nothing to be read now, or enough is kept.
    bool Take(Stream stream) {
      std::string* const into = stream == Stream::kOutput ? &outcome->output : &outcome->error;
      const std::string bytes = child.Read(stream);
      into->append(bytes, 0, kMostKept - into->size());
      return !bytes.empty() && into->size() < kMostKept;
    }

    CommandOutcome* outcome;
    Child child;
    TimePoint until;
    bool killed = false;
  };

  // Starts what may start now. False if nothing is left to be started.
  bool Begin() {
    while (next_ < commands_.size() && running_.size() < at_once_ && signal_ == 0) {
      auto one = std::make_unique<Running>(&loop_, &outcomes_[next_], Clock::now() + patience_);
      commands_[next_].own_group = true;  // Ctrl-C is for us
      int error = 0;
      const core::Status status = one->child.Start(commands_[next_++], &error);
      if (!status.ok()) one->outcome->why = status.message();
      if (status.ok()) running_.push_back(std::move(one));
    }
    return next_ < commands_.size() && signal_ == 0;
  }

  void Step() {
    TimePoint until = TimePoint::max();
    for (const auto& one : running_) {
      for (const Stream stream : kStreams) one->child.Ask(stream);
      if (!one->killed) until = std::min(until, one->until);
    }
    if (!running_.empty()) loop_.Run(until);
    for (const auto& one : running_) CheckEnd(one.get());
    std::erase_if(running_, [](const auto& one) { return !one->child.running(); });
  }

  void CheckEnd(Running* one) const {
    if (const auto end = one->child.Ended()) {
      // Programs that it has left may hold the pipes open, as ssh does that serves later calls.
      for (const Stream stream : kStreams) {
        while (one->Take(stream)) continue;
      }
      one->outcome->in_time = !one->killed;
      one->outcome->end = *end;
    } else if (!one->killed && (signal_ != 0 || Clock::now() >= one->until)) {
      one->child.Signal(SIGKILL, /*group=*/true);
      one->killed = true;
    }
  }

  Loop loop_;
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
