#include "launch/job/job.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/text.h"
#include "launch/base/child.h"
#include "launch/base/rank_messages.h"
#include "launch/base/shell_text.h"
#include "launch/base/signal_pipe.h"
#include "launch/base/sockets.h"
#include "launch/job/connections.h"
#include "launch/job/failure_judgement.h"
#include "launch/job/job_output.h"
#include "launch/job/job_ranks.h"
#include "launch/job/leftovers.h"
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
// The time after a rank's failure by which its launcher has ended the others, or does not.
constexpr auto kStopAfter = std::chrono::seconds(2);
// The time after the word to stop by which the ranks have killed what did not.
constexpr auto kTerminateAfter = std::chrono::seconds(4);
// The time for the launcher to end after its own signal.
constexpr auto kKillAfter = std::chrono::seconds(3);
// The time after a signal from which another counts as asking twice. Some send one to this process
// and to its group, which is one asking.
constexpr auto kAskedOnce = std::chrono::seconds(1);
// The time after the launcher's end for what the ranks have still to say.
constexpr auto kLastWords = std::chrono::seconds(2);
// The same where it matters which hosts are gone: until a silent one is noticed.
constexpr auto kSilence = std::chrono::seconds(14);
// Bytes that are kept of what the launcher prints about the end of a run.
constexpr std::size_t kMostHeld = std::size_t{64} * 1024;

std::size_t MostGreeters(std::size_t ranks) {
  const std::size_t taken = ranks + kOtherFiles;
  const std::size_t files = std::max(RaiseFileLimit(), taken);
  return std::clamp(files - taken, std::size_t{1}, kMostGreeters + kAddressesOfRank * ranks);
}

class Job {
 public:
  Job(const Plan& plan, const core::EnvironmentView& env)
      : plan_(plan),
        env_(env),
        ranks_(static_cast<std::size_t>(plan.placement.ranks)),
        connections_(MostGreeters(ranks_.size())) {}

  Status Start(const LaunchOptions& options, bool again, core::Duration start_timeout) {
    may_restart_ = options.max_restarts > 0;
    verbose_ = options.verbose;
    Status status = output_.Open(options, plan_.placement.ranks, again, env_);
    if (status.ok()) status = SignalPipe::Open(SignalPipe::User::kTaken);
    Command command{plan_.command, plan_.environment, {}, true};
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
    start_timeout_ = start_timeout;
    start_by_ = Clock::now() + start_timeout;
    return status;
  }

  JobResult Run() {
    while (!Done()) Step();
    EndOrphans("ssh");
    if (!signalled_at_ && !told_launcher_ && launcher_end_->kind == EndKind::kSignalled &&
        launcher_end_->value == SIGKILL) {
      // What became of the ranks follows from that.
      failure_ = JudgeKilledLauncher(plan_.command.front(), *launcher_end_);
    }
    bool explained = failure_.has_value();
    if (!failure_) {
      failure_ = JudgeLauncher(ranks_, begun_, plan_.command.front(), *launcher_end_);
    }
    if (failure_ && failure_->follows && IsCause(FirstFault(), *failure_)) {
      failure_->fault = FirstFault();
    }
    if (failure_ && failure_->follows && failure_->fault.empty()) explained = false;
    if (failure_ && !explained) std::fputs(held_.c_str(), stderr);
    if (!failure_) {
      if (launcher_end_->value != 0) NoteLauncherCode();
      return {output_.failed() ? 1 : 0, false, {}};
    }
    std::fputs(FailureText(*failure_).c_str(), stderr);
    return {failure_->code, !signalled_at_ && failure_->may_pass,
            GoneHosts(ranks_, plan_.placement, HostName())};
  }

 private:
  // Open MPI ends with such a code when a rank did not finalize MPI: after a fault that the program
  // has gone on from that may not be possible.
  void NoteLauncherCode() const {
    std::fprintf(
        stderr,
        "sirtakirun: %s ended with exit code %d, which is ignored: every rank ended with 0\n",
        plan_.command.front().c_str(), launcher_end_->value);
  }

  // Listens, and tells the ranks where.
  Status Announce(Command* command) {
    int port = 0;
    const std::string key = RandomKey();
    if (key.empty()) return {core::StatusCode::kBackend, "the system gives no random numbers"};
    Status status = connections_.Open(plan_.placement.local, key, &port);
    if (!status.ok()) return status;
    std::vector<std::string> addresses = {"127.0.0.1"};
    if (!plan_.placement.local) addresses = OwnAddresses(plan_.interfaces);
    if (addresses.empty()) {
      return {core::StatusCode::kInvalidArgument,
              plan_.interfaces.empty()
                  ? "this machine has no network interface that other hosts could reach"
                  : "--network-interfaces: this machine has no address on " +
                        Joined(plan_.interfaces, ",")};
    }
    for (std::string& address : addresses) address += ":" + std::to_string(port);
    command->set.emplace_back(kAddressVariable, Joined(addresses, ","));
    command->set.emplace_back(kKeyVariable, key);
    if (std::string folder = CurrentFolder(); !folder.empty()) {
      command->set.emplace_back(kFolderVariable, std::move(folder));
    }
    return Status::Ok();
  }

  void Step() {
    const auto waits = [this](Stream stream) { return output_.HasWaiting(stream); };
    std::vector<pollfd> fds = {{SignalPipe::fd(), POLLIN, 0},
                               {connections_.accept_fd(), POLLIN, 0},
                               {output_.Wants(Stream::kOutput) ? STDOUT_FILENO : -1, POLLOUT, 0},
                               {output_.Wants(Stream::kError) ? STDERR_FILENO : -1, POLLOUT, 0},
                               // A slow reader holds the launcher up too.
                               {waits(Stream::kOutput) ? -1 : launcher_.output().get(), POLLIN, 0},
                               {waits(Stream::kError) ? -1 : launcher_.error().get(), POLLIN, 0}};
    const std::size_t first = fds.size();
    for (const auto& connection : connections_.all()) {
      const int events = connection->outbox.empty() ? POLLIN : POLLIN | POLLOUT;
      fds.push_back({connection->fd.get(), static_cast<short>(events), 0});
    }
    poll(fds.data(), fds.size(), Patience());
    if (fds[0].revents != 0) TakeSignals();
    if (fds[2].revents != 0) output_.Write(Stream::kOutput);
    if (fds[3].revents != 0) output_.Write(Stream::kError);
    if (fds[4].revents != 0) TakeOutputOfLauncher(Stream::kOutput);
    if (fds[5].revents != 0) TakeOutputOfLauncher(Stream::kError);
    for (std::size_t i = first; i < fds.size(); ++i) {
      Connection& connection = *connections_.all()[i - first];
      if ((fds[i].revents & POLLOUT) != 0) Flush(&connection);
      if ((fds[i].revents & ~POLLOUT) != 0) Read(&connection);
    }
    if (fds[1].revents != 0) connections_.AcceptAll(Clock::now());
    for (const auto& [rank, bytes] : output_.TakeWritten()) Send(rank, WrittenMessage{bytes});
    CheckTimes();
    connections_.RemoveClosed();
  }

  int Patience() const {
    std::optional<TimePoint> next = connections_.NextTime();
    for (const auto& time : {start_by_, init_by_, stop_at_, terminate_at_, kill_at_, leave_at_}) {
      if (time && (!next || *time < *next)) next = time;
    }
    if (!next) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now());
    return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
  }

  void TakeSignals() {
    for (const int signal : SignalPipe::Take()) {
      if (signal == SIGCHLD) continue;
      if (signal == SIGUSR1 || signal == SIGUSR2) {  // the launcher takes it to all hosts
        if (begun_) launcher_.Signal(signal);
        continue;
      }
      const TimePoint now = Clock::now();
      const bool again = signalled_at_ && now >= *signalled_at_ + kAskedOnce;
      if (!signalled_at_) signalled_at_ = now;
      Fail({128 + signal, "ended by " + SignalName(signal), {}}, now);
      // Who asks twice does not want to wait, nor who asks when all but the output is over.
      if (again || given_up_) KillNow();
    }
    if (const auto end = launcher_.Ended()) {
      launcher_end_ = end;
      for (const Stream stream : {Stream::kOutput, Stream::kError}) {
        while (TakeOutputOfLauncher(stream)) continue;
      }
      output_.FinishLauncher();
      leave_at_ = Clock::now() + (may_restart_ && !signalled_at_ ? kSilence : kLastWords);
    }
  }

  // False if there is nothing. What it prints about the end of a rank is held back: the ranks have
  // said more.
  bool TakeOutputOfLauncher(Stream stream) {
    const bool is_output = stream == Stream::kOutput;
    const Descriptor& from = is_output ? launcher_.output() : launcher_.error();
    if (!from.valid()) return false;
    std::string bytes;
    if (ReadSome(from.get(), &bytes).ended) {
      is_output ? launcher_.CloseOutput() : launcher_.CloseError();
    }
    if (begun_ && !verbose_ && (failure_ || !faults_.empty())) {
      if (held_.size() < kMostHeld) held_ += bytes;
    } else {
      output_.AppendOfLauncher(stream, bytes);
    }
    return !bytes.empty();
  }

  void Read(Connection* connection) {
    std::string bytes;
    const Transfer transfer = ReadSome(connection->fd.get(), &bytes);
    connection->reader.Append(bytes);
    std::optional<RankMessage> message;
    Status status;
    while ((status = connection->reader.Next(&message)).ok() && message) {
      if (!Take(connection, *message)) return Drop(connection, "");
    }
    if (!status.ok()) return Drop(connection, status.message());
    if (transfer.ended) Drop(connection, transfer.why, transfer.silent);
  }

  // False if the message does not come from a rank of ours.
  bool Take(Connection* connection, const RankMessage& message) {
    if (!connection->keeper.knows()) {
      std::string reply;
      if (!connection->keeper.Take(message, &reply)) return false;
      if (connection->keeper.knows()) connection->reader.Allow(kMaxMessage);
      connection->outbox += reply;
      Flush(connection);
      return true;
    }
    if (const auto* hello = std::get_if<HelloMessage>(&message)) return Greet(connection, *hello);
    if (connection->rank < 0) return false;
    Rank& rank = ranks_[static_cast<std::size_t>(connection->rank)];
    if (const auto* output = std::get_if<OutputMessage>(&message)) {
      output_.Append(connection->rank, output->stream, output->bytes);
    } else if (const auto* end = std::get_if<EndMessage>(&message)) {
      rank.ended = true;
      rank.in_init = true;
      rank.through = true;
      told_others_ = told_others_ || end->told;
      output_.Finish(connection->rank);
      if (!begun_ && end->kind == EndKind::kSignalled) {
        Withdraw();
        return true;
      }
      auto failure = JudgeEnd(connection->rank, rank.hello.host, *end,
                              output_.LastErrorLines(connection->rank));
      if (failure) Fail(std::move(*failure), Clock::now() + kStopAfter);
      TimeInit();
    } else if (const auto* init = std::get_if<InitMessage>(&message)) {
      (init->through ? rank.through : rank.in_init) = true;
      TimeInit();
    } else if (std::holds_alternative<StopMessage>(message)) {
      rank.stops = true;
    } else if (const auto* fault = std::get_if<FaultMessage>(&message)) {
      std::erase_if(faults_, [&](const auto& told) { return told.first == connection->rank; });
      if (!fault->text.empty()) faults_.emplace_back(connection->rank, core::Escaped(fault->text));
    }
    return true;
  }

  bool Greet(Connection* connection, const HelloMessage& hello) {
    if (connection->rank >= 0) return false;
    const auto size = static_cast<int>(ranks_.size());
    if (hello.size != size || hello.rank < 0 || hello.rank >= size ||
        ranks_[static_cast<std::size_t>(hello.rank)].connection != nullptr) {
      Fail({1,
            "a process on host " + core::Escaped(hello.host) + " says that it is rank " +
                std::to_string(hello.rank) + " of " + std::to_string(hello.size) +
                ", but this run has ranks 0 to " + std::to_string(size - 1) + ", each once",
            {}},
           Clock::now());
      return false;
    }
    connection->rank = hello.rank;
    ranks_[static_cast<std::size_t>(hello.rank)] = {connection, hello, PeerAddress(connection->fd)};
    ++greeted_;
    if (stopped_) {
      Send(hello.rank, StopMessage{});
    } else if (greeted_ == size && !failure_ && !withdrawn_) {
      Go();
    }
    return true;
  }

  // All ranks are there: their programs may begin.
  void Go() {
    begun_ = true;
    start_by_.reset();
    GoMessage go;
    go.master_address = MasterAddress();
    go.master_port = ranks_.front().hello.port;
    const std::string own = HostName();
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      const Host* const host = HostOf(ranks_, rank, plan_.placement, own);
      std::vector<std::string> devices;
      if (host != nullptr) {
        for (const int device : host->devices) devices.push_back(std::to_string(device));
      }
      go.devices = Joined(devices, ",");
      Send(static_cast<int>(rank), go);
    }
  }

  // Once all ranks are in MPI_Init, or have ended, none of them waits for a program that has not
  // come so far.
  void TimeInit() {
    const auto all = [this](bool Rank::*member) {
      return std::all_of(ranks_.begin(), ranks_.end(),
                         [member](const Rank& rank) { return rank.*member; });
    };
    if (all(&Rank::through)) {
      init_by_.reset();
    } else if (!init_by_ && !failure_ && all(&Rank::in_init)) {
      init_by_ = Clock::now() + start_timeout_;
    }
  }

  // Where the others reach rank 0. If it is on this machine, where one of them has reached us: of
  // several addresses rank 0 may have taken one that is of use here only.
  std::string MasterAddress() const {
    const Rank& first = ranks_.front();
    if (plan_.placement.local) return "127.0.0.1";
    if (first.hello.host == HostName()) {
      for (const Rank& rank : ranks_) {
        if (rank.hello.host != first.hello.host) return OwnAddress(rank.connection->fd);
      }
    }
    return PeerAddress(first.connection->fd);
  }

  void Send(int rank, const RankMessage& message) {
    Connection* const connection = ranks_[static_cast<std::size_t>(rank)].connection;
    if (connection == nullptr || !connection->fd.valid()) return;
    connection->outbox += Encode(message);
    Flush(connection);
  }

  void Flush(Connection* connection) {
    // What an error here means, reading tells as well.
    const Transfer transfer = WriteSome(connection->fd.get(), connection->outbox);
    connection->outbox.erase(0, transfer.ended ? connection->outbox.size() : transfer.bytes);
  }

  void Drop(Connection* connection, const std::string& why, bool silent = false) {
    connection->fd.Close();
    if (connection->rank < 0) return;
    Rank& rank = ranks_[static_cast<std::size_t>(connection->rank)];
    rank.connection = nullptr;
    if (rank.ended) return;
    rank.ended = true;
    rank.lost = true;
    if (!begun_ && !silent) return Withdraw();
    rank.gone = IsGone(silent, rank.stops, failure_.has_value(), told_others_);
    output_.Finish(connection->rank);
    Fail(JudgeLoss(connection->rank, rank.hello.host,
                   why.empty() ? "its connection closed without a message" : why, rank.gone,
                   output_.LastErrorLines(connection->rank)),
         Clock::now() + kStopAfter);
  }

  // A rank was ended, or killed, before it began. The launcher does so when another cannot start,
  // and its own end then says more.
  void Withdraw() {
    withdrawn_ = true;
    start_by_.reset();
    if (!stopped_ && !stop_at_) stop_at_ = Clock::now() + kStopAfter;
  }

  std::string FirstFault() const { return faults_.empty() ? "" : faults_.front().second; }

  // The run has failed; what comes later follows from that. The launcher ends the others; at
  // `stop_at` they are told to stop.
  void Fail(Failure failure, TimePoint stop_at) {
    if (!failure_ || IsCauseOf(failure, *failure_, stopped_)) {
      failure_ = std::move(failure);
      if (IsCause(FirstFault(), *failure_)) failure_->fault = FirstFault();
    }
    start_by_.reset();
    init_by_.reset();
    if (!stopped_ && (!stop_at_ || stop_at < *stop_at_)) stop_at_ = stop_at;
  }

  void CheckTimes() {
    const TimePoint now = Clock::now();
    const auto is_due = [now](std::optional<TimePoint>* time) {
      if (!*time || now < **time) return false;
      time->reset();
      return true;
    };
    connections_.CheckTimes(now);
    const HostList& hosts = plan_.placement.hosts;
    if (is_due(&start_by_)) Fail(JudgeStart(ranks_, hosts, start_timeout_), now);
    if (is_due(&init_by_)) Fail(JudgeInit(ranks_, hosts, start_timeout_), now);
    if (is_due(&stop_at_)) {
      stopped_ = true;
      AdoptOrphans();
      for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) Send(rank, StopMessage{});
      // A launcher that is told to end while it ends ranks may crash. It ends when they have.
      terminate_at_ = greeted_ == 0 ? now : now + kTerminateAfter;
    }
    if (is_due(&terminate_at_)) {
      told_launcher_ = true;
      launcher_.Signal(SIGTERM);
      kill_at_ = now + kKillAfter;
    }
    if (is_due(&kill_at_)) KillNow();
    is_due(&leave_at_);
  }

  // Ranks end themselves when their connection does. A reader who takes his time gets what they
  // have said, unless somebody wants an end.
  void KillNow() {
    stop_at_.reset();
    terminate_at_.reset();
    kill_at_.reset();
    told_launcher_ = true;
    launcher_.Signal(SIGKILL);
    if (signalled_at_) output_.Discard();
    given_up_ = true;
  }

  // The launcher has ended, the ranks have said all, and it is written.
  bool Done() const {
    if (!launcher_end_) return false;
    const bool heard = given_up_ || connections_.all().empty() || !leave_at_;
    return heard && !output_.HasWaiting(Stream::kOutput) && !output_.HasWaiting(Stream::kError);
  }

  const Plan& plan_;
  const core::EnvironmentView& env_;
  std::vector<Rank> ranks_;
  Connections connections_;
  JobOutput output_;
  Child launcher_;
  std::optional<EndMessage> launcher_end_;
  std::string held_;                // of what it prints
  std::optional<Failure> failure_;  // the first, or what it follows from
  std::vector<std::pair<int, std::string>>
      faults_;  // of ranks' groups, in the order of their coming
  int greeted_ = 0;
  bool begun_ = false;  // the programs
  bool withdrawn_ = false;
  bool may_restart_ = false;
  bool verbose_ = false;
  bool stopped_ = false;
  bool given_up_ = false;
  bool told_launcher_ = false;             // to end
  bool told_others_ = false;               // the launcher has, by a signal to a rank
  std::optional<TimePoint> signalled_at_;  // first
  core::Duration start_timeout_{};
  std::optional<TimePoint> start_by_;  // ranks
  std::optional<TimePoint> init_by_;   // ranks come out of MPI_Init
  std::optional<TimePoint> stop_at_;
  std::optional<TimePoint> terminate_at_;
  std::optional<TimePoint> kill_at_;
  std::optional<TimePoint> leave_at_;
};

}  // namespace

JobResult RunJob(const Plan& plan, const LaunchOptions& options, bool again,
                 const core::EnvironmentView& env, core::Duration start_timeout) {
  Job job(plan, env);
  const Status status = job.Start(options, again, start_timeout);
  if (!status.ok()) {
    std::fprintf(stderr, "sirtakirun: %s\n", status.message().c_str());
    return {2, false, {}};
  }
  return job.Run();
}

}  // namespace sirtaki::launch
