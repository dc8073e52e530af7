#include "launch/job/own_launcher.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "core/base/environment.h"
#include "core/base/text.h"
#include "core/base/types.h"
#include "launch/base/build_facts.h"
#include "launch/base/child.h"
#include "launch/base/descriptor.h"
#include "launch/base/loop.h"
#include "launch/base/rank_messages.h"
#include "launch/base/shell_text.h"
#include "launch/hosts/host_list.h"
#include "launch/job/failure_judgement.h"
#include "launch/job/start_order.h"
#include "launch/options/options.h"
#include "launch/plan/plan.h"
#include "launch/plan/rank_place.h"
#include "launch/plan/routes.h"
#include "launch/plan/ssh_failure.h"

namespace sirtaki::launch {

using core::Status;
using core::StatusCode;

namespace {

constexpr int kFailed = 1;
constexpr int kNotReached =
    1;  // the exit code of a rank that has said why it reaches no sirtakirun
constexpr std::size_t kMostKept = std::size_t{16} * 1024;  // of what an ssh has printed
constexpr auto kAskAgain = std::chrono::seconds(1);  // whether the terminal may be read by now

int Complain(int code, const std::string& text) {
  std::fprintf(stderr, "sirtakirun: %s\n", text.c_str());
  return code;
}

bool WriteAll(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t put = write(fd, bytes.data(), bytes.size());
    if (put < 0 && errno != EINTR) return false;
    bytes.remove_prefix(put < 0 ? 0 : static_cast<std::size_t>(put));
  }
  return true;
}

// Starts children, passes on what they print, and waits until all have ended or one has failed: ranks
// that are left then are ended by the sirtakirun of the user, or by its absence.
class Starter {
 public:
  Starter() {
    RaiseFileLimit();
    // SIGINT and SIGHUP of the terminal are for the sirtakirun of the user.
    loop_.TakeSignals(Loop::UserSignals::kIgnored, [this](int signal) {
      if (signal != SIGTERM) return;
      told_ = true;
      SignalAll(SIGTERM);
    });
  }

  // `host` is where ssh goes; empty: the command is a rank of this host.
  Status Start(Command command, const std::string& host) {
    // Signals to this process's group pass a rank by until it has one of its own.
    command.own_group = true;
    // A rank ends itself and its program when its connection does, with more care than SIGKILL.
    command.outlives = host.empty();
    auto one = std::make_unique<Running>(&loop_, host);
    int error = 0;
    Status status = one->child.Start(command, &error);
    if (status.ok()) children_.push_back(std::move(one));
    return status;
  }

  // `judge` gives the exit code for the end of an ssh; 0: all is well.
  using Judge = std::function<int(const std::string& host, const EndMessage&, const std::string&)>;
  int Wait(const Judge& judge) {
    int code = 0;
    while (code == 0 && !children_.empty()) {
      for (const auto& one : children_) one->child.AskAll();
      loop_.Run(core::TimePoint::max());
      for (const auto& one : children_) {
        const auto end = one->child.Ended();
        if (!end) continue;
        one->child.Drain();
        if (code == 0 && !told_) code = CodeOf(*one, *end, judge);
      }
      std::erase_if(children_, [](const auto& one) { return !one->child.running(); });
    }
    return told_ ? kFailed : code;
  }

 private:
  struct Running {
    Running(Loop* loop, std::string to)
        : host(std::move(to)), child(loop, [this](Stream stream) { return Pass(stream); }) {}

    // False if there is nothing to be read now.
    bool Pass(Stream stream) {
      const std::string bytes = child.Read(stream);
      WriteAll(stream == Stream::kOutput ? STDOUT_FILENO : STDERR_FILENO, bytes);
      if (!host.empty() && stream == Stream::kError) {
        said += bytes;
        if (said.size() > kMostKept) said.erase(0, said.size() - kMostKept);
      }
      return !bytes.empty();
    }

    const std::string host;
    Child child;
    std::string said;
  };

  // A rank that somebody has killed is known to sirtakirun by its connection.
  static int CodeOf(const Running& one, const EndMessage& end, const Judge& judge) {
    if (!one.host.empty()) return judge(one.host, end, one.said);
    if (end.kind != EndKind::kExited || end.value == 0) return 0;
    return end.value == kNotReached ? kSaidWhy : kFailed;
  }

  void SignalAll(int signal) const {
    for (const auto& one : children_) one->child.Signal(signal);
  }

  Loop loop_;
  std::vector<std::unique_ptr<Running>> children_;
  bool told_ = false;  // to end
};

// The bytes as a file that nobody else can open; none if the system has no room for it.
Descriptor FileOf(std::string_view bytes) {
  const Descriptor file(memfd_create("order", MFD_CLOEXEC));
  if (!file.valid() || !WriteAll(file.get(), bytes)) return {};
  const std::string path = "/proc/self/fd/" + std::to_string(file.get());
  return Descriptor(open(path.c_str(), O_RDONLY | O_CLOEXEC));
}

// Passes on what comes by standard input, until nobody reads it any more.
void PassInput(const std::string& before, const Descriptor& into) {
  if (!WriteAll(into.get(), before)) return;
  std::array<char, kReadSize> buffer{};
  while (true) {
    const ssize_t got = read(STDIN_FILENO, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EIO && isatty(STDIN_FILENO) != 0) {
      // The terminal belongs to another group, as the shell's while this run is in the background.
      std::this_thread::sleep_for(kAskAgain);
      continue;
    }
    if (got <= 0) return;
    if (!WriteAll(into.get(), {buffer.data(), static_cast<std::size_t>(got)})) return;
  }
}

// The end of a pipe that gives `before`, then what comes by standard input. A process that is not of
// the terminal's group, as a rank, cannot read from it, and ssh needs the order first.
Descriptor InputAfter(std::string before) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return {};
  Descriptor reader(ends[0]);
  sigset_t all;
  sigset_t kept;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &kept);  // signals are for the other thread, and SIGTTIN is EIO
  std::thread([before = std::move(before), into = Descriptor(ends[1])] {
    PassInput(before, into);
  }).detach();
  pthread_sigmask(SIG_SETMASK, &kept, nullptr);
  return reader;
}

class OwnLauncher {
 public:
  int Run(const std::vector<std::string>& words) {
    Status status = Read(words);
    if (status.ok()) status = StartElsewhere();  // it takes longer
    if (status.ok()) status = StartHere();
    if (!status.ok()) return Complain(kSaidWhy, status.message());
    return starter_.Wait([this](const std::string& host, const EndMessage& end,
                                const std::string& said) { return JudgeHost(host, end, said); });
  }

 private:
  Status Read(const std::vector<std::string>& words) {
    const core::EnvironmentView env = core::EnvironmentView::OfProcess();
    Status status;
    std::size_t at = 0;
    for (; status.ok() && at + 1 < words.size() && words[at].starts_with('-'); at += 2) {
      const std::string& flag = words[at];
      const std::string& value = words[at + 1];
      if (flag == "-H") {
        status = ParseHosts(value, flag, &hosts_);
      } else if (flag == kFirstFlag) {
        first_ = NumberFrom<int>(value, 0, kMaxRanks).value_or(0);
      } else if (flag == "--here") {
        for (const std::string_view name : Split(value, ',')) here_.emplace_back(name);
      } else if (flag == "--ssh-timeout") {
        timeout_ = value;
      } else if (flag == "--ssh-args") {
        options_.ssh_args = ShellWords(value).value_or(std::vector<std::string>{});
      } else if (flag == "-x") {
        if (const auto text = env.FindEvenEmpty(value)) order_.variables.emplace_back(value, *text);
      } else {
        status = Status(StatusCode::kInvalidArgument,
                        std::string(kLauncherFlag) + " does not know " + core::Quoted(flag));
      }
    }
    order_.words.assign(words.begin() + static_cast<std::ptrdiff_t>(at), words.end());
    if (status.ok() && (order_.words.empty() || hosts_.empty())) {
      status = Status(StatusCode::kInvalidArgument,
                      std::string(kLauncherFlag) + " needs -H and a program");
    }
    size_ = first_;
    for (const Host& host : hosts_) {
      size_ += host.slots;
      if (IsHere(host)) local_size_ += host.slots;
    }
    return status;
  }

  bool IsHere(const Host& host) const {
    return std::find(here_.begin(), here_.end(), host.name) != here_.end();
  }

  // This machine may be named twice, "localhost" and by its name: its ranks count on.
  Status StartHere() {
    Status status;
    const Descriptor input = isatty(STDIN_FILENO) != 0 && IsHere(hosts_.front())
                                 ? InputAfter("")
                                 : Descriptor(fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 0));
    int first = first_;
    int local_rank = 0;
    for (const Host& host : hosts_) {
      for (int i = 0; IsHere(host) && i < host.slots && status.ok(); ++i) {
        const RankPlace place{first + i, size_, local_rank++, local_size_};
        Command command{order_.words, PlaceVariables(place), {}};
        command.input = place.rank == 0 ? input.get() : Command::kNoInput;
        status = starter_.Start(command, "");
      }
      first += host.slots;
    }
    return status;
  }

  Status StartElsewhere() {
    const std::string order = Encode(order_, FactsOfBuild().version);
    int first = first_;
    for (const Host& host : hosts_) {
      if (!IsHere(host)) {
        const Descriptor input = first == 0 ? InputAfter(order) : FileOf(order);
        if (!input.valid()) return {StatusCode::kBackend, "no file can be opened for " + host.name};
        Command command{Words(host, first), {}, {}};
        command.input = input.get();
        const Status status = starter_.Start(command, host.name);
        if (!status.ok()) {
          return {status.code(), status.message() + ": install an ssh client on this machine"};
        }
      }
      first += host.slots;
    }
    return Status::Ok();
  }

  // The command that starts the ranks of another host. The remote shell takes the last word apart.
  std::vector<std::string> Words(const Host& host, int first) const {
    std::vector<std::string> there;
    for (const auto& [name, value] : order_.variables) {
      // sirtakirun itself may need it.
      if (name == "LD_LIBRARY_PATH") there = {"env", std::string(name).append("=").append(value)};
    }
    there.insert(there.end(),
                 {order_.words.front(), std::string(kDaemonFlag), std::to_string(first),
                  std::to_string(host.slots), std::to_string(size_)});
    std::vector<std::string> words = {"ssh", "-T"};  // a terminal would change the order's bytes
    const std::vector<std::string> more = SshArguments(options_);
    words.insert(words.end(), more.begin(), more.end());
    if (!timeout_.empty()) words.insert(words.end(), {"-o", "ConnectTimeout=" + timeout_});
    // Behind a link that goes down it is to end by itself.
    words.insert(words.end(), {"-o", "ServerAliveInterval=5", host.name, ShellLine(there)});
    return words;
  }

  int JudgeHost(const std::string& host, const EndMessage& end, const std::string& said) const {
    const bool by_itself = end.kind == EndKind::kExited;
    for (const int code : {0, kFailed, kSaidWhy}) {
      if (by_itself && end.value == code) return code;
    }
    return Complain(kSaidWhy, "host " + host + ": " + WhyEnded(host, end, said));
  }

  std::string WhyEnded(const std::string& host, const EndMessage& end,
                       const std::string& said) const {
    if (end.kind == EndKind::kSignalled) return "its ssh died of " + SignalName(end.value);
    if (end.value != kOfSsh) return JudgeSilence(order_.words.front(), end, said);
    if (!said.empty()) return JudgeSsh(options_, host, said);
    return "its ssh ended without a word: the connection broke, or what started its ranks was "
           "killed; by hand: " +
           SshByHand(options_, host);
  }

  HostList hosts_;  // with the ranks of each as slots
  std::vector<std::string> here_;
  LaunchOptions options_;  // those for ssh
  std::string timeout_;
  StartOrder order_;
  int first_ = 0;  // rank
  int size_ = 0;
  int local_size_ = 0;
  Starter starter_;
};

// Reads no more than the order: what follows is rank 0's.
Status TakeOrder(StartOrder* order) {
  std::string line;
  char c = 0;
  ssize_t got = 0;
  while ((got = read(STDIN_FILENO, &c, 1)) != 0 && c != '\n' && line.size() < kMaxOrderHead) {
    if (got > 0) line.push_back(c);
    if (got < 0 && errno != EINTR) break;
  }
  std::size_t length = 0;
  Status status = ReadOrderHead(line, FactsOfBuild().version, &length);
  if (!status.ok()) return status;
  std::string bytes;
  while (bytes.size() < length) {
    const Transfer transfer = ReadSome(STDIN_FILENO, &bytes, length - bytes.size());
    if (transfer.ended) return {StatusCode::kProtocol, "its input ends within the order"};
  }
  return ReadOrder(bytes, order);
}

Status StartAsDaemon(const std::vector<std::string>& words, Starter* starter) {
  std::array<int, 3> numbers{};  // first, count, size
  bool fit = words.size() == numbers.size();
  for (std::size_t i = 0; fit && i < numbers.size(); ++i) {
    const auto number = NumberFrom<int>(words[i], 0, kMaxRanks);
    fit = number.has_value();
    numbers[i] = number.value_or(0);
  }
  if (!fit) {
    return {StatusCode::kInvalidArgument,
            std::string(kDaemonFlag) + " needs the first rank, their count and that of all"};
  }
  StartOrder order;
  Status status = TakeOrder(&order);
  for (const auto& [name, value] : order.variables) {
    if (name != kFolderVariable) continue;
    // Where it is not, ranks stay at home, and say so.
    const int entered = chdir(value.c_str());
    static_cast<void>(entered);
  }
  for (int i = 0; status.ok() && i < numbers[1]; ++i) {
    Command command{order.words, order.variables, {}};
    const RankPlace place{numbers[0] + i, numbers[2], i, numbers[1]};
    for (auto& variable : PlaceVariables(place)) command.set.push_back(std::move(variable));
    if (place.rank != 0) command.input = Command::kNoInput;
    status = starter->Start(command, "");
  }
  return status;
}

}  // namespace

int RunAsLauncher(const std::vector<std::string>& words) { return OwnLauncher().Run(words); }

int RunAsDaemon(const std::vector<std::string>& words) {
  Starter starter;
  const Status status = StartAsDaemon(words, &starter);
  if (!status.ok()) return Complain(kSaidWhy, "host " + HostName() + ": " + status.message());
  return starter.Wait({});
}

}  // namespace sirtaki::launch
