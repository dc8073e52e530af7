#include "launch/job/job.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/text.h"
#include "launch/base/child.h"
#include "launch/base/greeting.h"
#include "launch/base/loop.h"
#include "launch/base/rank_messages.h"
#include "launch/job/connections.h"
#include "launch/job/course.h"
#include "launch/job/failure_judgement.h"
#include "launch/job/job_output.h"
#include "launch/job/job_ranks.h"
#include "launch/job/leftovers.h"
#include "launch/job/own_launcher.h"
#include "launch/plan/routes.h"

namespace sirtaki::launch {

using core::Clock;
using core::Status;
using core::TimePoint;

namespace {

// Connections that have not proven that they are ranks', besides those that ranks make at the start:
// to all addresses at once.
constexpr std::size_t kMostGreeters = 64;
constexpr std::size_t kAddressesOfRank = 4;
constexpr std::size_t kOtherFiles = 32;  // that this process has open
// Bytes that are kept of what the launcher prints about the end of a run.
constexpr std::size_t kMostHeld = std::size_t{64} * 1024;
// Where our own launcher has failed, ranks that are lost may be known only after it.
constexpr core::Duration kMissedFirst = std::chrono::seconds(1);

std::size_t MostGreeters(std::size_t ranks) {
  const std::size_t taken = ranks + kOtherFiles;
  const std::size_t files = std::max(RaiseFileLimit(), taken);
  return std::clamp(files - taken, std::size_t{1}, kMostGreeters + kAddressesOfRank * ranks);
}

class Job {
 public:
  Job(const Plan& plan, const core::EnvironmentView& env, const LaunchOptions& options,
      core::Duration start_timeout)
      : plan_(plan),
        env_(env),
        options_(options),
        start_timeout_(start_timeout),
        ranks_(static_cast<std::size_t>(plan.placement.ranks)),
        course_(plan.placement.ranks, Clock::now(), start_timeout),
        connections_(
            &loop_, MostGreeters(ranks_.size()),
            [this](Connection* from, const RankMessage& message) { return Take(from, message); },
            [this](Connection* connection, const Status& why) { Drop(connection, why); }),
        output_(&loop_),
        launcher_(&loop_, [this](Stream stream) { return TakeOutputOfLauncher(stream); }) {}

  Status Start(bool again) {
    Status status = output_.Open(options_, plan_.placement.ranks, again, env_);
    loop_.TakeSignals(Loop::UserSignals::kTaken, [this](int signal) { TakeSignal(signal); });
    Command command{plan_.command, plan_.environment, {}};
    // Ctrl-C is for us, and what a launcher does to its group is not for whoever started us. But
    // only the terminal's own group may read from it.
    command.own_group = isatty(STDIN_FILENO) == 0;
    if (status.ok()) status = Announce(&command);
    // MPICH 5.0's -genvlist loses the last variable that there is: not one of ours, but the one
    // that shells put there.
    command.unset.emplace_back("_");
    command.set.emplace_back("_", plan_.command.front());
    int error = 0;
    if (status.ok()) status = launcher_.Start(command, &error);
    return status;
  }

  JobResult Run() {
    for (Settle(); !IsOver(); Settle()) {
      loop_.Run(std::min(course_.NextTime(), connections_.NextTime()));
    }
    EndOrphans("ssh");
    const bool explained = Conclude();
    const std::optional<Failure>& failure = verdict_.failure;
    if (!failure) {
      // Open MPI ends with such a code when a rank did not finalize MPI: after a fault that the
      // program has gone on from that may not be possible.
      if (launcher_end_->value != 0) {
        std::fprintf(
            stderr,
            "sirtakirun: %s ended with exit code %d, which is ignored: every rank ended with 0\n",
            plan_.command.front().c_str(), launcher_end_->value);
      }
      return {output_.failed() ? 1 : 0, false, {}};
    }
    if (!explained) std::fputs(held_.c_str(), stderr);
    std::fputs(FailureText(*failure).c_str(), stderr);
    return {failure->code, !course_.signalled() && failure->may_pass,
            GoneHosts(ranks_, plan_.placement, HostName())};
  }

 private:
  // False if what the launcher has printed tells more.
  bool Conclude() {
    const std::string& launcher = plan_.command.front();
    std::optional<Failure>& failure = verdict_.failure;
    if (!course_.signalled() && !course_.told_launcher() &&
        launcher_end_->kind == EndKind::kSignalled && launcher_end_->value == SIGKILL) {
      // The end of the ranks follows from that.
      failure = JudgeKilledLauncher(launcher, *launcher_end_);
    }
    const bool told = failure.has_value();
    if (!told) failure = JudgeEndOfLauncher();
    verdict_.Conclude();
    if (!failure || failure->text.empty()) return false;
    return failure->follows ? !failure->fault.empty() : told;
  }

  // The text is empty if the launcher has said why itself.
  std::optional<Failure> JudgeEndOfLauncher() const {
    auto failure = JudgeLauncher(ranks_, course_.begun(), plan_.command.front(), *launcher_end_);
    if (failure && OwnLauncherFailed() && launcher_end_->value == kSaidWhy) {
      failure = Failure{1, "", {}};
    }
    return failure;
  }

  bool OwnLauncherFailed() const {
    return plan_.own && launcher_end_ && launcher_end_->kind == EndKind::kExited &&
           launcher_end_->value != 0;
  }

  // Listens, and tells the ranks where.
  Status Announce(Command* command) {
    const Status status = connections_.OpenFor(plan_, plan_.placement.local, &command->set);
    if (!status.ok()) return status;
    if (std::string folder = CurrentFolder(); !folder.empty() && !options_.ChoosesFolder()) {
      command->set.emplace_back(kFolderVariable, std::move(folder));
    }
    return Status::Ok();
  }

  // Does what follows from what has happened, and from time.
  void Settle() {
    const TimePoint now = Clock::now();
    for (Due due; (due = course_.TakeDue(now)) != Due::kNothing;) Do(due);
    for (const auto& [rank, bytes] : output_.TakeWritten()) Send(rank, WrittenMessage{bytes});
    connections_.CheckTimes(now);
    output_.WriteWhenReady();
    for (const Stream stream : kStreams) {
      // A slow reader holds the launcher up too.
      if (!output_.HasWaiting(stream)) launcher_.Ask(stream);
    }
  }

  void Do(Due due) {
    const HostList& hosts = plan_.placement.hosts;
    switch (due) {
      case Due::kLateStart:
        return verdict_.Take(JudgeStart(ranks_, hosts, start_timeout_), false);
      case Due::kLateInit:
        return verdict_.Take(JudgeInit(ranks_, hosts, start_timeout_), false);
      case Due::kStop:
        AdoptOrphans();
        if (OwnLauncherFailed() && !verdict_.failure) {  // what ranks say from here on follows
          if (auto failure = JudgeEndOfLauncher()) verdict_.Take(std::move(*failure), false);
        }
        for (int rank = 0; rank < plan_.placement.ranks; ++rank) Send(rank, StopMessage{});
        return;
      case Due::kTerminate:  // one that is told to end while it ends ranks may crash
        return launcher_.Signal(SIGTERM);
      case Due::kKill:
        return KillLauncher();
      case Due::kNothing:
        return;
    }
  }

  // Ranks end themselves when their connection does. A reader who takes his time gets what they
  // have said, unless somebody wants an end.
  void KillLauncher() {
    launcher_.Signal(SIGKILL);
    if (course_.signalled()) output_.Discard();
  }

  void TakeSignal(int signal) {
    if (signal == SIGCHLD) return CheckLauncher();
    if (signal == SIGUSR1 || signal == SIGUSR2) {
      if (course_.begun()) PassOn(signal);
      return;
    }
    verdict_.Take({128 + signal, "ended by " + SignalName(signal), {}}, course_.stopped());
    if (course_.TakeSignal(Clock::now())) KillLauncher();
  }

  // An MPI's launcher takes it to all hosts.
  void PassOn(int signal) {
    if (!plan_.own) return launcher_.Signal(signal);
    for (int rank = 0; rank < plan_.placement.ranks; ++rank) Send(rank, SignalMessage{signal});
  }

  void CheckLauncher() {
    const auto end = launcher_.Ended();
    if (!end) return;
    launcher_end_ = end;
    launcher_.Drain();
    output_.FinishLauncher();
    // A launcher that is killed ends nobody: its ranks would run on, and another attempt beside them.
    if (end->kind == EndKind::kSignalled) course_.Fail(Clock::now(), core::Duration(0));
    const bool may_restart = options_.max_restarts > 0 && !course_.signalled();
    course_.NoteLauncherEnd(may_restart || OwnLauncherFailed(), Clock::now());
    if (!OwnLauncherFailed()) return;
    // A rank whose host is gone has a moment to be missed first: it tells more.
    course_.Fail(Clock::now(), course_.begun() ? kMissedFirst : core::Duration(0));
  }

  // False if there is nothing. What it prints about the end of a rank is held back: the ranks have
  // said more.
  bool TakeOutputOfLauncher(Stream stream) {
    const std::string bytes = launcher_.Read(stream);
    if (course_.begun() && !options_.verbose && (verdict_.failure || !verdict_.faults.empty())) {
      if (held_.size() < kMostHeld) held_ += bytes;
    } else {
      output_.AppendOfLauncher(stream, bytes);
    }
    return !bytes.empty();
  }

  // False if the message does not come from a rank of ours.
  bool Take(Connection* connection, const RankMessage& message) {
    if (const auto* hello = std::get_if<HelloMessage>(&message)) return Greet(connection, *hello);
    if (connection->rank < 0) return false;
    Rank& rank = ranks_[static_cast<std::size_t>(connection->rank)];
    if (const auto* output = std::get_if<OutputMessage>(&message)) {
      output_.Append(connection->rank, output->stream, output->bytes);
    } else if (const auto* end = std::get_if<EndMessage>(&message)) {
      TakeEnd(connection->rank, *end);
    } else if (const auto* init = std::get_if<InitMessage>(&message)) {
      (init->through ? rank.through : rank.in_init) = true;
      TimeInit();
    } else if (std::holds_alternative<StopMessage>(message)) {
      rank.stops = true;
    } else if (const auto* fault = std::get_if<FaultMessage>(&message)) {
      verdict_.TakeFault(connection->rank, fault->text);
    }
    return true;
  }

  bool Greet(Connection* connection, const HelloMessage& hello) {
    if (connection->rank >= 0) return false;
    const auto size = static_cast<int>(ranks_.size());
    if (hello.size != size || hello.rank < 0 || hello.rank >= size ||
        ranks_[static_cast<std::size_t>(hello.rank)].connection != nullptr) {
      verdict_.Take(
          {1,
           "a process on host " + core::Escaped(hello.host) + " says that it is rank " +
               std::to_string(hello.rank) + " of " + std::to_string(hello.size) +
               ", but this run has ranks 0 to " + std::to_string(size - 1) + ", each once",
           {}},
          course_.stopped());
      course_.Fail(Clock::now(), core::Duration(0));
      return false;
    }
    connection->rank = hello.rank;
    ranks_[static_cast<std::size_t>(hello.rank)] = {connection, hello,
                                                    connection->link.other_address()};
    if (course_.Arrive()) Go();
    if (course_.stopped()) Send(hello.rank, StopMessage{});
    return true;
  }

  // All ranks are there: their programs may begin.
  void Go() {
    GoMessage go;
    go.master_address = MasterAddress();
    go.master_port = ranks_.front().hello.port;
    const std::string own = HostName();
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      const Host* const host = HostOf(ranks_, rank, plan_.placement, own);
      go.devices = host == nullptr ? "" : DevicesText(*host);
      Send(static_cast<int>(rank), go);
    }
  }

  // Where the others reach rank 0. If it is on this machine, where one of them has reached us: of
  // several addresses rank 0 may have taken one that is of use here only.
  std::string MasterAddress() const {
    const Rank& first = ranks_.front();
    if (plan_.placement.local) return "127.0.0.1";
    if (first.hello.host == HostName()) {
      for (const Rank& rank : ranks_) {
        if (rank.hello.host == first.hello.host) continue;
        const std::string own = rank.connection->link.own_end();
        return own.substr(0, own.rfind(':'));
      }
    }
    return first.address;
  }

  void TakeEnd(int number, const EndMessage& end) {
    Rank& rank = ranks_[static_cast<std::size_t>(number)];
    rank.ended = rank.in_init = rank.through = true;
    told_others_ = told_others_ || end.told;
    output_.Finish(number);
    // It was ended before it began. The launcher does so when another cannot start, and its own end
    // then says more.
    if (!course_.begun() && end.kind == EndKind::kSignalled) return course_.Fail(Clock::now());
    auto failure = JudgeEnd(number, rank.hello.host, end, output_.LastErrorLines(number));
    if (failure) {
      Fail(std::move(*failure));
    } else {
      verdict_.NoteGoodEnd(number, rank.hello.host, course_.stopped());
    }
    TimeInit();
  }

  void TimeInit() {
    course_.NoteInit(std::ranges::all_of(ranks_, &Rank::in_init),
                     std::ranges::all_of(ranks_, &Rank::through), Clock::now());
  }

  void Drop(Connection* connection, const Status& why) {
    if (connection->rank < 0) return;
    Rank& rank = ranks_[static_cast<std::size_t>(connection->rank)];
    rank.connection = nullptr;
    if (rank.ended) return;
    rank.ended = true;
    rank.lost = true;
    const bool silent = why.code() == core::StatusCode::kTimedOut;
    if (!course_.begun() && !silent) return course_.Fail(Clock::now());  // killed before it began
    rank.gone = IsGone(silent, rank.stops, verdict_.failure.has_value(), told_others_);
    output_.Finish(connection->rank);
    Fail(JudgeLoss(connection->rank, rank.hello.host,
                   why.ok() ? "its connection closed without a message" : why.message(), rank.gone,
                   output_.LastErrorLines(connection->rank)));
  }

  // A rank has failed; what comes later follows from that.
  void Fail(Failure failure) {
    // Our own launcher does not end ranks; what is no consequence needs no other to be waited for.
    const bool at_once = plan_.own && !failure.follows;
    verdict_.Take(std::move(failure), course_.stopped());
    if (at_once) return course_.Fail(Clock::now(), core::Duration(0));
    course_.Fail(Clock::now());
  }

  void Send(int rank, const RankMessage& message) {
    Connection* const connection = ranks_[static_cast<std::size_t>(rank)].connection;
    if (connection != nullptr) connection->link.Send(Encode(message));
  }

  // The launcher has ended, the ranks have said all, and it is written.
  bool IsOver() const {
    if (!launcher_end_) return false;
    const bool heard = connections_.all().empty() || !course_.hears_ranks();
    return heard && !output_.HasWaiting(Stream::kOutput) && !output_.HasWaiting(Stream::kError);
  }

  const Plan& plan_;
  const core::EnvironmentView& env_;
  const LaunchOptions& options_;
  const core::Duration start_timeout_;
  Loop loop_;
  std::vector<Rank> ranks_;
  Course course_;
  Verdict verdict_;
  bool told_others_ = false;  // the launcher has, by a signal to a rank
  Connections connections_;
  JobOutput output_;
  Child launcher_;
  std::optional<EndMessage> launcher_end_;
  std::string held_;  // what it has printed that is not shown yet
};

}  // namespace

JobResult RunJob(const Plan& plan, const LaunchOptions& options, bool again,
                 const core::EnvironmentView& env, core::Duration start_timeout) {
  Job job(plan, env, options, start_timeout);
  const Status status = job.Start(again);
  if (!status.ok()) {
    std::fprintf(stderr, "sirtakirun: %s\n", status.message().c_str());
    return {2, false, {}};
  }
  return job.Run();
}

}  // namespace sirtaki::launch
