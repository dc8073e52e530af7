#include "launch/plan/ssh_failure.h"

#include <array>
#include <string_view>
#include <vector>

#include "core/base/text.h"
#include "launch/base/shell_text.h"
#include "launch/plan/plan.h"

namespace sirtaki::launch {

using core::Quoted;

std::string LastLine(std::string_view text) {
  std::string_view last;
  for (const std::string_view line : Split(text, '\n')) {
    if (!Trimmed(line).empty()) last = Trimmed(line);
  }
  return core::Escaped(last.substr(0, 300));
}

namespace {

// A sign is what ssh prints, what it means, and what helps; "%" stands for the command by hand.
struct Sign {
  std::string_view text;
  std::string_view cause;
  std::string_view cure;
  bool passes = false;  // when a host that is starting is up
};

// The first that is found counts: a cause stands before what follows from it.
constexpr std::array<Sign, 15> kSigns = {
    {{"Could not resolve hostname", "no host of this name is known here",
      "check its spelling, or give it an address (DNS, /etc/hosts, HostName in an ssh config)",
      true},
     {"Connection refused", "no ssh server listens there",
      "start sshd on it, or name its port with -p", true},
     {"No route to host", "it does not answer", "is it up, and does a firewall let ssh pass?",
      true},
     {"Network is unreachable", "it does not answer", "is it up, and does a firewall let ssh pass?",
      true},
     {"timed out", "it does not answer", "is it up, and does a firewall let ssh pass?", true},
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
     {"Connection closed by", "its ssh server hung up", "its log says why; by hand: %", true},
     {"Connection reset by", "its ssh server hung up", "its log says why; by hand: %", true},
     {"Bad configuration option", "ssh does not accept its settings",
      "correct the file or --ssh-args"},
     {"Bad owner or permissions", "ssh does not accept its settings", "chmod 600 the file"},
     {"Can't open user config file", "ssh does not accept its settings",
      "correct the path in --ssh-args"}}};

std::string LineWith(std::string_view text, std::string_view part) {
  for (const std::string_view line : Split(text, '\n')) {
    if (line.find(part) != std::string_view::npos) return LastLine(line);
  }
  return "";
}

}  // namespace

std::string SshByHand(const LaunchOptions& options, const std::string& host) {
  std::vector<std::string> words = {"ssh"};
  const std::vector<std::string> more = SshArguments(options);
  words.insert(words.end(), more.begin() + 2, more.end());  // it may ask then
  words.push_back(host);
  return ShellLine(words);
}

bool MayPass(const std::string& error) {
  for (const Sign& sign : kSigns) {
    if (!LineWith(error, sign.text).empty()) return sign.passes;
  }
  return false;
}

std::string JudgeSsh(const LaunchOptions& options, const std::string& host,
                     const std::string& error) {
  for (const Sign& sign : kSigns) {
    const std::string line = LineWith(error, sign.text);
    if (line.empty()) continue;
    std::string cure(sign.cure);
    if (cure.ends_with('%')) cure.replace(cure.size() - 1, 1, SshByHand(options, host));
    return std::string(sign.cause).append(" (").append(line).append("): ").append(cure);
  }
  const std::string line = LastLine(error);
  return "ssh failed" + (line.empty() ? "" : " (" + line + ")") +
         ": try it by hand: " + SshByHand(options, host);
}

std::string JudgeSilence(const std::string& self, const EndMessage& end, const std::string& error) {
  const std::string line = LastLine(error);
  const std::string because = line.empty() ? "" : " (" + line + ")";
  if (error.find("error while loading shared libraries") != std::string::npos) {
    return Quoted(self) + " does not run there" + because + ": install this library on it";
  }
  if (end.kind == EndKind::kExited && (end.value == 126 || end.value == 127)) {
    return Quoted(self) + " is not there" + because +
           ": install Sirtaki under the same path on every host";
  }
  return Quoted(self) + " gives no report there but exit code " + std::to_string(end.value) +
         because + ": install the same version under the same path on every host";
}

}  // namespace sirtaki::launch
