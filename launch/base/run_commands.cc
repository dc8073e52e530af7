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
  Runner(std::vector<Command> commands, core::Duration patience, std::size_t at_once,
         const RunAgain& again)
      : commands_(std::move(commands)),
        patience_(patience),
        at_once_(at_once),
        again_(again),
        outcomes_(commands_.size()) {
    for (std::size_t i = 0; i < commands_.size(); ++i) due_.push_back({i, TimePoint::min()});
  }

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
    Running(Loop* loop, std::size_t number, CommandOutcome* into, TimePoint time)
        : index(number),
          outcome(into),
          child(loop, [this](Stream stream) { return Take(stream); }),
          until(time) {}

    // False if there is nothing to be read now, or enough is kept.
    bool Take(Stream stream) {
      std::string* const into = stream == Stream::kOutput ? &outcome->output : &outcome->error;
      const std::string bytes = child.Read(stream);
      into->append(bytes, 0, kMostKept - into->size());
      return !bytes.empty() && into->size() < kMostKept;
    }

    std::size_t index;
    CommandOutcome* outcome;
    Child child;
    TimePoint until;
    bool killed = false;
  };

  struct Due {
    std::size_t index;
    TimePoint from;
  };

  // Starts what may start now. False if nothing is left to be started.
  bool Begin() {
    if (signal_ != 0) due_.clear();
    const TimePoint now = Clock::now();
    std::erase_if(due_, [this, now](const Due& due) {
      if (due.from > now || running_.size() >= at_once_) return false;
      Start(due.index, now + patience_);
      return true;
    });
    return !due_.empty();
  }

  void Start(std::size_t index, TimePoint until) {
    outcomes_[index] = {};
    auto one = std::make_unique<Running>(&loop_, index, &outcomes_[index], until);
    commands_[index].own_group = true;  // Ctrl-C is for us
    int error = 0;
    const core::Status status = one->child.Start(commands_[index], &error);
    if (!status.ok()) one->outcome->why = status.message();
    if (status.ok()) running_.push_back(std::move(one));
  }

  void Step() {
    TimePoint until = TimePoint::max();
    for (const auto& one : running_) {
      one->child.AskAll();
      if (!one->killed) until = std::min(until, one->until);
    }
    if (running_.size() < at_once_) {
      for (const Due& due : due_) until = std::min(until, due.from);
    }
    if (!running_.empty() || !due_.empty()) loop_.Run(until);
    for (const auto& one : running_) CheckEnd(one.get());
    std::erase_if(running_, [](const auto& one) { return !one->child.running(); });
  }

  void CheckEnd(Running* one) {
    if (const auto end = one->child.Ended()) {
      one->child.Drain();
      one->outcome->in_time = !one->killed;
      one->outcome->end = *end;
      if (!again_ || one->killed || signal_ != 0) return;
      const auto pause = again_(one->index, *one->outcome, &commands_[one->index]);
      if (pause) due_.push_back({one->index, Clock::now() + *pause});
    } else if (!one->killed && (signal_ != 0 || Clock::now() >= one->until)) {
      one->child.Signal(SIGKILL, /*group=*/true);
      one->killed = true;
    }
  }

  Loop loop_;
  std::vector<Command> commands_;
  const core::Duration patience_;
  const std::size_t at_once_;
  const RunAgain& again_;
  std::vector<CommandOutcome> outcomes_;
  std::vector<std::unique_ptr<Running>> running_;
  std::vector<Due> due_;
  int signal_ = 0;
};

}  // namespace

std::vector<CommandOutcome> RunCommands(std::vector<Command> commands, core::Duration patience,
                                        std::size_t at_once, int* signal, const RunAgain& again) {
  return Runner(std::move(commands), patience, at_once, again).Run(signal);
}

}  // namespace sirtaki::launch
