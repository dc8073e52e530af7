#include "launch/job/rank_process.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <deque>
#include <optional>
#include <utility>

#include "core/base/environment.h"
#include "core/base/hmac.h"
#include "core/base/text.h"
#include "core/base/types.h"
#include "core/machine/cgroup.h"
#include "core/machine/elastic_notice.h"
#include "core/machine/start_notice.h"
#include "launch/base/child.h"
#include "launch/base/descriptor.h"
#include "launch/base/greeting.h"
#include "launch/base/loop.h"
#include "launch/base/rank_messages.h"
#include "launch/base/shell_text.h"
#include "launch/hosts/host_list.h"
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
// The last words have this time, within which a link that is down is noticed.
constexpr auto kFarewell = std::chrono::seconds(15);
constexpr auto kTellAgain = std::chrono::milliseconds(50);  // a program that had no room for it
constexpr int kNoticesATurn = 16;
constexpr int kLastNotices = 1000;  // more than a queue of them has room for

// Says whether a signal has stopped the process.
bool IsStopped(pid_t process) {
  const auto stat = core::ReadFile("/proc/" + std::to_string(process) + "/stat");
  const std::size_t name_end = stat ? stat->rfind(')') : std::string::npos;
  return name_end != std::string::npos && stat->compare(name_end, 3, ") T") == 0;
}

class RankProcess {
 public:
  RankProcess(std::vector<std::string> program, core::EnvironmentView env)
      : program_(std::move(program)),
        env_(std::move(env)),
        notices_(&loop_, [this] { TakeNotices(kNoticesATurn); }),
        child_(&loop_, [this](Stream stream) { return TakeOutput(stream); }) {}

  int Run() {
    setpgid(0, 0);  // what the program starts belongs to the group too
    const Status status = Connect();
    if (!status.ok()) {
      std::fprintf(stderr, "sirtakirun: %s: %s\n", HostName().c_str(), status.message().c_str());
      return 1;
    }
    loop_.TakeSignals(Loop::UserSignals::kIgnored, [this](int signal) { TakeSignal(signal); });
    for (; !Done(); CheckTimes()) {
      notices_.Ask();
      for (const Stream stream : kStreams) {
        if (HasRoom()) child_.Ask(stream);
      }
      TellProgram();
      loop_.Run(to_tell_.empty() ? until_ : std::min<TimePoint>(until_, Clock::now() + kTellAgain));
    }
    const bool badly = stopped_ || ExitCode() != 0;
    if (badly) RemoveLeftovers();
    if (is_lost_) EndDaemon();
    // The user's sirtakirun knows by the connection how this has ended: its launcher need not.
    return IsStartedBySirtakirun(env_) ? 0 : ExitCode();
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
    status = ConnectToAny(&loop_, *address, *key, kConnectTimeout, &link_);
    if (!status.ok()) {
      return {status.code(), "rank " + std::to_string(place_.rank) +
                                 " does not reach sirtakirun: " + status.message() +
                                 "; --network-interfaces chooses where it listens"};
    }
    link_.Trust();
    link_.Hear([this](const RankMessage& message) { return Take(message); },
               [this](const Status& why) {
                 is_lost_ = !(half_closed_ && why.ok());
                 Lose();
               });
    Send(HelloMessage{place_.rank, place_.size, place_.local_rank, HostName(), FreePort()});
    return Status::Ok();
  }

  void Send(RankMessage message) { link_.Send(Encode(std::move(message))); }

  bool HasRoom() const { return unwritten_ + kMaxOutputBytes <= kMaxUnwritten; }

  void TakeSignal(int signal) {
    if (signal != SIGCHLD) {
      told_ = true;
      return Stop();
    }
    const auto end = child_.Ended();
    if (!end) return;
    TakeNotices(kLastNotices);  // what it had to say
    end_ = end;
    // The others of the job wait for its end, and what it has started may hold its output open.
    if (IsElastic() && OwnsGroup() && (end->kind != EndKind::kExited || end->value != 0)) {
      KillOthersOfGroup();
    }
    // SIGKILL was somebody else's: the launcher's would have ended this process too.
    const bool by_others = end->kind == EndKind::kSignalled && end->value == SIGKILL && !killed_;
    end_->told = told_ && !by_others;
    for (const Stream stream : kStreams) LastWords(stream) = child_.Unread(stream);
    until_ = Clock::now() + kDrainAfter;
  }

  std::size_t& LastWords(Stream stream) { return last_words_[static_cast<std::size_t>(stream)]; }

  void TakeNotices(int most) {
    if (!notices_.is_open()) return;
    for (auto& [notice, text, from, process] : core::HearStart(notices_.fd(), most)) {
      const bool is_through = notice == core::StartNotice::kIsThrough;
      if (notice == core::StartNotice::kElastic) {
        TakeElastic(std::move(from), process, std::move(text));
      } else if (is_through || notice == core::StartNotice::kBegins) {
        Send(InitMessage{is_through});
      } else {
        Send(FaultMessage{notice == core::StartNotice::kFault ? std::move(text) : ""});
      }
    }
  }

  // A process that the program starts has its variables, too.
  void TakeElastic(std::string from, pid_t process, std::string text) {
    const bool is_other = !program_hears_at_.empty() && from != program_hears_at_;
    const auto refuse = [&](const std::string& why) {
      const core::ElasticNotice refusal{.kind = core::ElasticNotice::Kind::kOver, .text = why};
      core::SendNotice(notices_.fd(), from, core::StartNotice::kElastic, core::Encode(refusal));
    };
    // A notice that is nothing tells whether the socket is still there.
    if (is_other &&
        (core::SendNotice(notices_.fd(), program_hears_at_, core::StartNotice::kAgain, "") ||
         errno == EAGAIN)) {
      return refuse(
          "init() was called in a process that the program of an elastic job has started, and that "
          "one has the place in the job: put what only the program does behind if __name__ == "
          "\"__main__\"");
    }
    // The job goes on with the one that it knows, which left its place with its end.
    if (is_other && has_place_) {
      return refuse(
          "init() was called in a second process of a program of an elastic job, and the place in "
          "the job was that of the first one, which has ended: call it in one process only");
    }
    program_hears_at_ = std::move(from);
    program_process_ = process;
    Send(ElasticMessage{std::move(text)});
  }

  // False if there is nothing that can be sent on now.
  bool TakeOutput(Stream stream) {
    if (!HasRoom()) return false;
    OutputMessage output{stream, child_.Read(stream, kMaxOutputBytes)};
    if (output.bytes.empty()) return false;
    unwritten_ += output.bytes.size();
    LastWords(stream) -= std::min(LastWords(stream), output.bytes.size());
    Send(std::move(output));
    return true;
  }

  bool Take(const RankMessage& message) {
    if (const auto* go = std::get_if<GoMessage>(&message)) Start(*go);
    if (const auto* written = std::get_if<WrittenMessage>(&message)) {
      WaitForReader();
      unwritten_ -= std::min(unwritten_, written->bytes);
    }
    if (const auto* elastic = std::get_if<ElasticMessage>(&message)) {
      TellIfStopped(elastic->notice);
      const auto notice = core::DecodeElasticNotice(elastic->notice);
      has_place_ |= notice && notice->kind == core::ElasticNotice::Kind::kPlace;
      to_tell_.push_back(elastic->notice);
    }
    if (const auto* signal = std::get_if<SignalMessage>(&message)) {
      if (signal->signal == SIGKILL) Kill();
      // Other signals that end a program are not passed on so.
      const bool is_users = signal->signal == SIGUSR1 || signal->signal == SIGUSR2;
      if (is_users && child_.running()) SignalThoseThatCatch(signal->signal);
    }
    if (std::holds_alternative<StopMessage>(message)) Stop();
    return true;
  }

  // A program that is stopped would be waited for.
  void TellIfStopped(const std::string& text) {
    const auto notice = core::DecodeElasticNotice(text);
    const bool is_over = notice && notice->kind == core::ElasticNotice::Kind::kOver;
    if (!is_over || !IsStopped(program_process_)) return;
    const core::ElasticNotice told{.kind = core::ElasticNotice::Kind::kIsStopped,
                                   .generation = notice->generation};
    Send(ElasticMessage{core::Encode(told)});
  }

  // A program that is stopped has no room for more than a few.
  void TellProgram() {
    while (!to_tell_.empty() && child_.running() && !program_hears_at_.empty()) {
      const bool told = core::SendNotice(notices_.fd(), program_hears_at_,
                                         core::StartNotice::kElastic, to_tell_.front());
      if (!told && errno == EAGAIN) return;
      to_tell_.pop_front();
    }
    to_tell_.clear();  // there is nobody to hear it
  }

  void Start(const GoMessage& go) {
    if (started_) return;
    started_ = true;
    Command command{
        program_,
        {},
        {std::string(kAddressVariable), std::string(kKeyVariable), std::string(kNetworkVariable),
         std::string(kFolderVariable), std::string(kElasticJobVariable)}};
    AddPlace(go, &command);
    command.unset.insert(command.unset.end(), kPlaceVariables.begin(), kPlaceVariables.end());
    AddMedium(&command);
    AddInterfaces(&command);
    // Python would keep what it prints into a pipe, and lose it where the rank is killed.
    const char* const unbuffered = "PYTHONUNBUFFERED";
    if (!env_.FindEvenEmpty(unbuffered)) command.set.emplace_back(unbuffered, "1");
    EnterFolder();
    std::string notices;
    Descriptor listens(core::ListenForStart(&notices));
    if (listens.valid()) command.set.emplace_back(core::kStartNoticeVariable, notices);
    if (listens.valid()) notices_.Open(std::move(listens));
    int error = EINVAL;
    Status status = AddDevices(go.devices, &command);
    if (status.ok()) status = child_.Start(command, &error);
    if (status.ok()) return;
    Finish({EndKind::kNotStarted, error, status.message(), false});
  }

  bool IsElastic() const { return env_.Find(kElasticJobVariable).has_value(); }

  // The places in an elastic job change, so its programs ask for theirs.
  void AddPlace(const GoMessage& go, Command* command) const {
    auto place = TorchrunVariables(place_, go.master_address, go.master_port, env_);
    if (!IsElastic()) {
      command->set = std::move(place);
      return;
    }
    for (const auto& [name, value] : place) command->unset.push_back(name);
    command->set.emplace_back(core::kElasticVariable, "1");
  }

  // The slots of a host are those GPUs that this job may see there.
  Status AddDevices(std::string devices, Command* command) const {
    const char* const name = "CUDA_VISIBLE_DEVICES";
    if (devices.empty()) return Status::Ok();
    if (const auto visible = env_.FindEvenEmpty(name)) {
      Status status = ChooseDevices(devices, *visible, &devices);
      if (!status.ok()) return status;
    }
    command->set.emplace_back(name, std::move(devices));
    return Status::Ok();
  }

  // The secret shows who has this run's key, and does not tell it.
  void AddMedium(Command* command) const {
    const auto set = [&](std::string_view name, const std::string& value) {
      if (!env_.Find(name)) command->set.emplace_back(name, value);
    };
    if (IsStartedBySirtakirun(env_)) set(kMediumVariable, "tcp");
    set(kSecretVariable,
        core::HexText(core::HmacSha256(env_.Find(kKeyVariable).value_or(""), "medium")));
  }

  // Launchers go to the folder of sirtakirun, or home where there is none, without a word. Only
  // MPICH's has been told to stay in /.
  void EnterFolder() {
    const auto folder = env_.Find(kFolderVariable);
    if (!folder) return;
    const bool there =
        CurrentFolder() == "/" ? chdir(folder->c_str()) == 0 : access(folder->c_str(), X_OK) == 0;
    if (there || place_.local_rank != 0) return;
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
    if (!stopped_ && !half_closed_) Send(StopMessage{});
    stopped_ = true;
    if (!started_) {
      started_ = true;
      Finish({EndKind::kSignalled, SIGTERM, "", told_});
      return;
    }
    if (!child_.running() || until_ != TimePoint::max()) return;
    SignalAll(SIGTERM);
    SignalAll(SIGCONT);  // what was stopped would not hear it
    until_ = Clock::now() + kKillRankAfter;
  }

  // At once, and with it what it has started.
  void Kill() {
    if (!child_.running()) return Stop();
    stopped_ = true;
    killed_ = true;
    child_.SignalAll(SIGKILL);
    if (OwnsGroup()) KillOthersOfGroup();
  }

  static bool OwnsGroup() { return getpgrp() == getpid(); }

  // The program and what it has started; this process takes it too, and knows already.
  void SignalAll(int signal) const {
    if (OwnsGroup()) kill(0, signal);
    if (!OwnsGroup() || child_.LeadsGroup()) child_.SignalAll(signal);
  }

  // It asks for something, and is to end nobody: a program that starts or ends, a shell around it, or
  // those that load its data.
  void SignalThoseThatCatch(int signal) const {
    if (OwnsGroup() && !child_.LeadsGroup()) {
      SignalOthersThatCatch(signal);
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
    link_.Close();
    unwritten_ = 0;
    if (!end_) Stop();
  }

  // Somebody reads slowly what the program said before its end: the time to drain it begins when there
  // is room again. What it has left may print for ever, and is not waited for.
  void WaitForReader() {
    const bool has_more = LastWords(Stream::kOutput) + LastWords(Stream::kError) > 0;
    if (end_ && !said_ && has_more && !HasRoom() && !stopped_) until_ = Clock::now() + kDrainAfter;
  }

  void CheckTimes() {
    WaitForReader();
    const bool is_over = Clock::now() >= until_;
    if (!end_ && is_over) {
      child_.SignalAll(SIGKILL);
      killed_ = true;
      until_ = TimePoint::max();
    } else if (end_ && !said_ && (is_over || !child_.prints())) {
      child_.StopReading();
      Finish(*end_);
    }
  }

  void Finish(EndMessage end) {
    end_ = std::move(end);
    said_ = true;
    until_ = Clock::now() + kFarewell;
    Send(*end_);
  }

  // When sirtakirun has all that there was to say, which it shows by closing.
  bool Done() {
    if (!said_) return false;
    if (link_.is_open() && link_.has_sent_all() && !half_closed_) {
      link_.EndSending();
      half_closed_ = true;
    }
    return !link_.is_open() || Clock::now() >= until_;
  }

  int ExitCode() const {
    if (end_->kind == EndKind::kNotStarted) return 127;
    return end_->kind == EndKind::kSignalled ? 128 + end_->value : end_->value;
  }

  const std::vector<std::string> program_;
  const core::EnvironmentView env_;
  RankPlace place_;
  Loop loop_;
  Link link_;
  Source notices_;  // of the program
  std::string program_hears_at_;
  pid_t program_process_ = 0;        // that hears there
  bool has_place_ = false;           // in a generation of an elastic job
  std::deque<std::string> to_tell_;  // notices for it
  Child child_;
  std::size_t unwritten_ = 0;
  std::array<std::size_t, kStreams.size()>
      last_words_{};  // of the program at its end, not sent yet
  bool started_ = false;
  bool stopped_ = false;
  bool told_ = false;  // to stop, by a signal
  bool killed_ = false;
  bool is_lost_ = false;  // sirtakirun, before it had all
  bool half_closed_ = false;
  std::optional<EndMessage> end_;
  bool said_ = false;  // how it has ended
  // The program, which was told to end, is killed then. After its end: what it has left may print until then. After that was
  // said: sirtakirun may hear it until then.
  TimePoint until_ = TimePoint::max();
};

}  // namespace

int RunAsRank(const std::vector<std::string>& program) {
  return RankProcess(program, core::EnvironmentView::OfProcess()).Run();
}

}  // namespace sirtaki::launch
