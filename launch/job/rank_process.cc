#include "launch/job/rank_process.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <optional>
#include <utility>

#include "core/base/environment.h"
#include "core/base/text.h"
#include "core/base/types.h"
#include "core/machine/cgroup.h"
#include "core/machine/start_notice.h"
#include "launch/base/child.h"
#include "launch/base/greeting.h"
#include "launch/base/rank_messages.h"
#include "launch/base/shell_text.h"
#include "launch/base/signal_pipe.h"
#include "launch/base/sockets.h"
#include "launch/job/leftovers.h"
#include "launch/plan/plan.h"
#include "launch/plan/rank_place.h"
#include "launch/plan/routes.h"

namespace sirtaki::launch {

using core::Clock;
using core::Status;
using core::StatusCode;
using core::TimePoint;

namespace {

constexpr auto kConnectTimeout = std::chrono::seconds(20);
constexpr auto kKillRankAfter = std::chrono::seconds(3);  // of the polite signal
constexpr auto kDrainAfter =
    std::chrono::seconds(1);  // of the program's end: what it has left may still print
constexpr auto kFarewell = std::chrono::seconds(5);  // to hand over the last words
constexpr int kNoticesATurn = 16;
constexpr int kLastNotices = 1000;  // more than a queue of them has room for

class RankProcess {
 public:
  RankProcess(std::vector<std::string> program, core::EnvironmentView env)
      : program_(std::move(program)), env_(std::move(env)) {}

  int Run() {
    setpgid(0, 0);  // what the program starts belongs to the group too
    Status status = Connect();
    if (status.ok()) status = SignalPipe::Open();
    if (!status.ok()) {
      std::fprintf(stderr, "sirtakirun: %s: %s\n", HostName().c_str(), status.message().c_str());
      return 1;
    }
    while (!Done()) Step();
    const bool badly = stopped_ || ExitCode() != 0;
    if (badly) RemoveLeftovers();
    if (!heard_) EndDaemon();
    return ExitCode();
  }

 private:
  Status Connect() {
    Status status = FindRank(env_, &place_);
    if (!status.ok()) return status;
    const auto address = env_.Find(kAddressVariable);
    const auto key = env_.Find(kKeyVariable);
    if (!address || !key) {
      return {StatusCode::kInvalidArgument, std::string(kAddressVariable) + " or " +
                                                std::string(kKeyVariable) +
                                                " is not set: the launcher did not pass it on"};
    }
    status = ConnectToAny(*address, *key, kConnectTimeout, &connection_);
    if (!status.ok()) {
      return {status.code(), "rank " + std::to_string(place_.rank) +
                                 " does not reach sirtakirun: " + status.message() +
                                 "; --network-interfaces chooses where it listens"};
    }
    Send(HelloMessage{place_.rank, place_.size, place_.local_rank, HostName(), FreePort()});
    return Status::Ok();
  }

  void Send(const RankMessage& message) { outbox_ += Encode(message); }

  void Step() {
    std::array<pollfd, 5> fds{};
    const bool room = HasRoom();
    fds[0] = {SignalPipe::fd(), POLLIN, 0};
    fds[1] = {connection_.get(), static_cast<short>(outbox_.empty() ? POLLIN : POLLIN | POLLOUT),
              0};
    fds[2] = {room ? child_.output().get() : -1, POLLIN, 0};
    fds[3] = {room ? child_.error().get() : -1, POLLIN, 0};
    fds[4] = {notices_.get(), POLLIN, 0};
    poll(fds.data(), fds.size(), Patience());
    if (fds[4].revents != 0) TakeNotices(kNoticesATurn);
    if (fds[0].revents != 0) TakeSignals();
    if (fds[2].revents != 0) TakeOutput(Stream::kOutput);
    if (fds[3].revents != 0 && HasRoom()) TakeOutput(Stream::kError);
    if ((fds[1].revents & POLLOUT) != 0) Write();
    if ((fds[1].revents & ~POLLOUT) != 0) Read();
    CheckTimes();
  }

  bool HasRoom() const { return unwritten_ + kMaxOutputBytes <= kMaxUnwritten; }

  // Until the next thing that time alone brings; -1: none.
  int Patience() const {
    std::optional<TimePoint> next;
    for (const auto& time : {kill_at_, drain_until_, leave_at_}) {
      if (time && (!next || *time < *next)) next = time;
    }
    if (!next) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now());
    return static_cast<int>(std::max<std::int64_t>(0, left.count()));
  }

  void TakeSignals() {
    for (const int signal : SignalPipe::Take()) {
      if (signal == SIGCHLD) continue;
      told_ = true;
      Stop();
    }
    if (const auto end = child_.Ended()) {
      TakeNotices(kLastNotices);  // what it had to say
      end_ = end;
      // SIGKILL was somebody else's: the launcher's would have ended this process too.
      const bool by_others = end->kind == EndKind::kSignalled && end->value == SIGKILL && !killed_;
      end_->told = told_ && !by_others;
      kill_at_.reset();
      drain_until_ = Clock::now() + kDrainAfter;
    }
  }

  void TakeNotices(int most) {
    if (!notices_.valid()) return;
    for (auto& [notice, text] : core::HearStart(notices_.get(), most)) {
      switch (notice) {
        case core::StartNotice::kBegins:
          Send(InitMessage{false});
          break;
        case core::StartNotice::kIsThrough:
          Send(InitMessage{true});
          break;
        case core::StartNotice::kFault:
          Send(FaultMessage{std::move(text)});
          break;
        case core::StartNotice::kAgain:
          Send(FaultMessage{});
          break;
      }
    }
  }

  void TakeOutput(Stream stream) {
    OutputMessage output{stream, ""};
    const bool is_output = stream == Stream::kOutput;
    const Transfer transfer = ReadSome((is_output ? child_.output() : child_.error()).get(),
                                       &output.bytes, kMaxOutputBytes);
    unwritten_ += output.bytes.size();
    if (!output.bytes.empty() && connection_.valid()) Send(std::move(output));
    if (!transfer.ended) return;
    if (is_output) {
      child_.CloseOutput();
    } else {
      child_.CloseError();
    }
  }

  void Write() {
    const Transfer transfer = WriteSome(connection_.get(), outbox_);
    outbox_.erase(0, transfer.bytes);
    if (transfer.ended) Lose();
  }

  void Read() {
    std::string bytes;
    const Transfer transfer = ReadSome(connection_.get(), &bytes);
    reader_.Append(bytes);
    std::optional<RankMessage> message;
    Status status;
    while ((status = reader_.Next(&message)).ok() && message) {
      if (const auto* go = std::get_if<GoMessage>(&*message)) Start(*go);
      if (const auto* written = std::get_if<WrittenMessage>(&*message)) {
        WaitForReader();
        unwritten_ -= std::min(unwritten_, written->bytes);
      }
      if (std::holds_alternative<StopMessage>(*message)) Stop();
    }
    heard_ = half_closed_ && transfer.ended && transfer.why.empty();
    if (transfer.ended || !status.ok()) Lose();
  }

  void Start(const GoMessage& go) {
    if (started_) return;
    started_ = true;
    Command command{program_,
                    TorchrunVariables(place_, go.master_address, go.master_port, env_),
                    {std::string(kAddressVariable), std::string(kKeyVariable),
                     std::string(kNetworkVariable), std::string(kFolderVariable)},
                    true};
    AddInterfaces(&command);
    TellOfFolder();
    std::string notices;
    notices_ = Descriptor(core::ListenForStart(&notices));
    if (notices_.valid()) command.set.emplace_back(core::kStartNoticeVariable, notices);
    if (!go.devices.empty()) command.set.emplace_back("CUDA_VISIBLE_DEVICES", go.devices);
    int error = 0;
    const Status status = child_.Start(command, &error);
    if (status.ok()) return;
    Finish({EndKind::kNotStarted, error, status.message(), false});
  }

  // Launchers go home where there is no such folder, without a word.
  void TellOfFolder() {
    const auto folder = env_.Find(kFolderVariable);
    if (!folder || place_.local_rank != 0 || access(folder->c_str(), X_OK) == 0) return;
    const std::string text = "sirtakirun: host " + HostName() + " has no folder " +
                             core::Quoted(*folder) + ": its ranks run in " + CurrentFolder() + "\n";
    unwritten_ += text.size();
    Send(OutputMessage{Stream::kError, text});
  }

  // NCCL and libfabric take names, which may be others on each host.
  void AddInterfaces(Command* command) const {
    const auto names = InterfacesIn(env_.Find(kNetworkVariable).value_or(""));
    if (names.empty()) return;
    const auto set = [&](const char* name, std::string value) {
      if (!env_.Find(name)) command->set.emplace_back(name, std::move(value));
    };
    set("NCCL_SOCKET_IFNAME", "=" + Joined(names, ","));
    set("FI_TCP_IFACE", names.front());
  }

  // Ends the program, and the run without it if it has not begun.
  void Stop() {
    if (!stopped_ && !half_closed_ && connection_.valid()) Send(StopMessage{});
    stopped_ = true;
    if (!started_) {
      started_ = true;
      Finish({EndKind::kSignalled, SIGTERM, "", told_});
      return;
    }
    if (!child_.running() || kill_at_) return;
    SignalAll(SIGTERM);
    SignalAll(SIGCONT);  // what was stopped would not hear it
    kill_at_ = Clock::now() + kKillRankAfter;
  }

  static bool OwnsGroup() { return getpgrp() == getpid(); }

  // The program and what it has started; this process takes it too, and knows already.
  void SignalAll(int signal) const {
    if (OwnsGroup()) {
      kill(0, signal);
    } else {
      child_.Signal(signal);
    }
  }

  void RemoveLeftovers() const {
    for (const auto& prefix : SegmentPrefixes(env_, HostName(), geteuid()))
      RemoveSegments("/dev/shm", prefix);
    if (OwnsGroup()) KillOthersOfGroup();
  }

  // The launcher's own process on this host: behind a link that is down it would wait for minutes.
  static void EndDaemon() {
    const std::string parent = std::to_string(getppid());
    const auto name = core::ReadFile("/proc/" + parent + "/comm");
    for (const char* daemon : {"orted\n", "prted\n", "hydra_pmi_proxy\n"}) {
      if (name == daemon) kill(getppid(), SIGTERM);
    }
  }

  // sirtakirun is gone, or cannot be reached any more.
  void Lose() {
    connection_.Close();
    outbox_.clear();
    unwritten_ = 0;
    if (!end_) Stop();
  }

  // Somebody reads slowly what there is: the time to drain it begins when there is room again.
  void WaitForReader() {
    if (drain_until_ && !HasRoom() && !stopped_) drain_until_ = Clock::now() + kDrainAfter;
  }

  void CheckTimes() {
    const TimePoint now = Clock::now();
    if (kill_at_ && now >= *kill_at_) {
      child_.Signal(SIGKILL);
      killed_ = true;
      kill_at_.reset();
    }
    if (!end_ || leave_at_) return;
    WaitForReader();
    const bool silent = !child_.output().valid() && !child_.error().valid();
    if (silent || now >= *drain_until_) {
      child_.CloseOutput();
      child_.CloseError();
      Finish(*end_);
    }
  }

  void Finish(EndMessage end) {
    end_ = std::move(end);
    drain_until_.reset();
    leave_at_ = Clock::now() + kFarewell;
    if (connection_.valid()) Send(*end_);
  }

  // When sirtakirun has all that there was to say, which it shows by closing.
  bool Done() {
    if (!leave_at_) return false;
    if (connection_.valid() && outbox_.empty() && !half_closed_) {
      shutdown(connection_.get(), SHUT_WR);
      half_closed_ = true;
    }
    return !connection_.valid() || Clock::now() >= *leave_at_;
  }

  int ExitCode() const {
    switch (end_->kind) {
      case EndKind::kExited:
        return end_->value;
      case EndKind::kSignalled:
        return 128 + end_->value;
      case EndKind::kNotStarted:
        break;
    }
    return 127;
  }

  const std::vector<std::string> program_;
  const core::EnvironmentView env_;
  RankPlace place_;
  Descriptor connection_;
  Descriptor notices_;  // of the program's start
  MessageReader reader_;
  std::string outbox_;
  Child child_;
  std::size_t unwritten_ = 0;
  bool started_ = false;
  bool stopped_ = false;
  bool told_ = false;  // to stop, by a signal
  bool killed_ = false;
  bool heard_ = false;  // by sirtakirun, to the end
  bool half_closed_ = false;
  std::optional<EndMessage> end_;
  std::optional<TimePoint> kill_at_;      // the program, which was told to end
  std::optional<TimePoint> drain_until_;  // what the program has printed
  std::optional<TimePoint> leave_at_;     // all has been said
};

}  // namespace

int RunAsRank(const std::vector<std::string>& program) {
  return RankProcess(program, core::EnvironmentView::OfProcess()).Run();
}

}  // namespace sirtaki::launch
