#include "launch/checks/host_checks.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <string_view>
#include <utility>

#include "core/base/text.h"
#include "launch/base/shell_text.h"

namespace sirtaki::launch {

using core::Quoted;

namespace {

std::vector<std::string> QuotedWords(std::vector<std::string> words) {
  for (std::string& word : words) word = ShellQuoted(word);
  return words;
}

std::int64_t SecondsOf(core::Duration patience) {
  return std::max<std::int64_t>(1, std::chrono::ceil<std::chrono::seconds>(patience).count());
}

// The command as one would type it.
std::string ByHand(const HostWish& wish, const std::string& host) {
  std::vector<std::string> words = {"ssh"};
  const std::vector<std::string> more = SshArguments(wish.options);
  words.insert(words.end(), more.begin() + 2, more.end());  // it may ask then
  words.push_back(host);
  return Joined(QuotedWords(std::move(words)), " ");
}

// A sign is what ssh prints, what it means, and what helps; "%" stands for the command by hand.
struct Sign {
  std::string_view text;
  std::string_view cause;
  std::string_view cure;
};

// The first that is found counts: a cause stands before what follows from it.
constexpr std::array<Sign, 15> kSigns = {
    {{"Could not resolve hostname", "no host of this name is known here",
      "check its spelling, or give it an address (DNS, /etc/hosts, HostName in an ssh config)"},
     {"Connection refused", "no ssh server listens there",
      "start sshd on it, or name its port with -p"},
     {"No route to host", "it does not answer", "is it up, and does a firewall let ssh pass?"},
     {"Network is unreachable", "it does not answer",
      "is it up, and does a firewall let ssh pass?"},
     {"timed out", "it does not answer", "is it up, and does a firewall let ssh pass?"},
     {"IDENTIFICATION HAS CHANGED", "its host key differs from the one that is known",
      "if that is right, remove the old one with ssh-keygen -R, and log in once: %"},
     {"Host key verification failed", "its host key is not known here",
      "log in once by hand and accept it: %"},
     {"UNPROTECTED PRIVATE KEY", "ssh does not use a key that others may read",
      "chmod 600 the key's file"},
     {"Too many authentication failures", "ssh offered more keys than the host accepts",
      "name the right one with -i, and add --ssh-args \"-o IdentitiesOnly=yes\""},
     {"Permission denied", "ssh does not get in without a password",
      "put your public key there with ssh-copy-id, or name the right one with -i, until this asks "
      "for nothing: %"},
     {"Connection closed by", "its ssh server hung up", "its log says why; by hand: %"},
     {"Connection reset by", "its ssh server hung up", "its log says why; by hand: %"},
     {"Bad configuration option", "ssh does not accept its settings",
      "correct the file or --ssh-args"},
     {"Bad owner or permissions", "ssh does not accept its settings", "chmod 600 the file"},
     {"Can't open user config file", "ssh does not accept its settings",
      "correct the path in --ssh-args"}}};

std::string LastLine(std::string_view text) {
  std::string_view last;
  for (const std::string_view line : Split(text, '\n')) {
    if (!Trimmed(line).empty()) last = Trimmed(line);
  }
  return core::Escaped(last.substr(0, 300));
}

std::string LineWith(std::string_view text, std::string_view part) {
  for (const std::string_view line : Split(text, '\n')) {
    if (line.find(part) != std::string_view::npos) return LastLine(line);
  }
  return "";
}

// ssh itself has failed.
std::string JudgeSsh(const std::string& error, const std::string& by_hand) {
  for (const Sign& sign : kSigns) {
    const std::string line = LineWith(error, sign.text);
    if (line.empty()) continue;
    std::string cure(sign.cure);
    if (cure.ends_with('%')) cure.replace(cure.size() - 1, 1, by_hand);
    return std::string(sign.cause).append(" (").append(line).append("): ").append(cure);
  }
  const std::string line = LastLine(error);
  return "ssh failed" + (line.empty() ? "" : " (" + line + ")") + ": try it by hand: " + by_hand;
}

// The sirtakirun there was not started, or is none that gives reports.
std::string JudgeSilence(const HostWish& wish, const CommandOutcome& outcome) {
  const std::string line = LastLine(outcome.error);
  const std::string because = line.empty() ? "" : " (" + line + ")";
  if (outcome.error.find("error while loading shared libraries") != std::string::npos) {
    return Quoted(wish.self) + " does not run there" + because + ": install this library on it";
  }
  if (outcome.end.kind == EndKind::kExited &&
      (outcome.end.value == 126 || outcome.end.value == 127)) {
    return Quoted(wish.self) + " is not there" + because +
           ": install Sirtaki under the same path on every host";
  }
  return Quoted(wish.self) + " gives no report there but exit code " +
         std::to_string(outcome.end.value) + because +
         ": install the same version under the same path on every host";
}

std::optional<std::string> JudgeReport(const HostWish& wish, const HostReport& here,
                                       const HostReport& there) {
  const std::string program = Quoted(wish.options.program.front());
  if (there.version != here.version) {
    return Quoted(wish.self) + " is of Sirtaki " + there.version + " there and " + here.version +
           " here: install the same version on every host";
  }
  const std::string launcher = wish.launcher.ShortName();
  if (there.launcher != launcher) {
    return Quoted(wish.launcher.path) + " is " +
           (there.launcher.empty() ? "no MPI launcher" : there.launcher) + " there and " +
           launcher + " here: install the same MPI under the same path on every host";
  }
  if (!there.program.empty()) {
    return "program " + program + " cannot be started there (" + there.program +
           "): put it under the same path on every host";
  }
  if (!there.missing.empty()) {
    return "program " + program + " does not find " + Joined(there.missing, ", ") +
           " there: install what is missing, or name its folder in LD_LIBRARY_PATH";
  }
  if (!here.library.empty() && here.library != there.library) {
    return "program " + program + " would load " +
           (there.library.empty() ? "no library of Sirtaki" : there.library) + " there and " +
           here.library + " here: install the same version on every host";
  }
  if (!here.mpi.empty() && here.mpi != there.mpi) {
    return "program " + program + " would load " +
           (there.mpi.empty() ? "no library of MPI" : there.mpi) + " there and " + here.mpi +
           " here: install the same MPI on every host, and name its folder in LD_LIBRARY_PATH if "
           "there are several";
  }
  return std::nullopt;
}

}  // namespace

HostWish WishOfPlan(const PlanInput& input, const Plan& plan, const std::string& folder,
                    core::Duration patience) {
  HostWish wish{input.options, input.launcher, input.self, folder, {}, patience};
  for (const char* name : {"PATH", "LD_LIBRARY_PATH"}) {
    auto value = input.environment.Find(name);
    for (const auto& [set, to] : plan.environment) {
      if (set == name) value = to;
    }
    if (value) wish.paths.emplace_back(name, *value);
  }
  return wish;
}

std::vector<std::string> AskingWords(const HostWish& wish, const std::string& host) {
  std::vector<std::string> there = {"env"};
  for (const auto& [name, value] : wish.paths) {
    there.push_back(std::string(name).append("=").append(value));
  }
  there.insert(there.end(), {wish.self, std::string(kHostFlag), wish.folder, wish.launcher.path,
                             wish.options.program.front()});
  std::vector<std::string> words = {"ssh", "-n"};
  const std::vector<std::string> more = SshArguments(wish.options);
  words.insert(words.end(), more.begin(), more.end());
  words.insert(words.end(), {"-o", "ConnectTimeout=" + std::to_string(SecondsOf(wish.patience)),
                             host, Joined(QuotedWords(std::move(there)), " ")});
  return words;
}

std::optional<std::string> JudgeHost(const HostWish& wish, const std::string& host,
                                     const HostReport& here, const CommandOutcome& outcome) {
  constexpr int kOfSsh = 255;
  if (!outcome.why.empty()) return outcome.why + ": install an ssh client on this machine";
  if (!outcome.in_time) {
    return "no answer within " + core::DurationText(wish.patience) +
           " (--start-timeout): is it up, and does a firewall let ssh pass? By hand: " +
           ByHand(wish, host);
  }
  const bool exited = outcome.end.kind == EndKind::kExited;
  if (!exited || outcome.end.value == kOfSsh) return JudgeSsh(outcome.error, ByHand(wish, host));
  const auto there = ReadReport(outcome.output);
  if (!there || outcome.end.value != 0) return JudgeSilence(wish, outcome);
  return JudgeReport(wish, here, *there);
}

}  // namespace sirtaki::launch
