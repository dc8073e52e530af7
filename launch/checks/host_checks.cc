#include "launch/checks/host_checks.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "core/base/text.h"
#include "launch/base/shell_text.h"
#include "launch/plan/ssh_failure.h"

namespace sirtaki::launch {

using core::Quoted;

namespace {

constexpr core::Duration kBrief = std::chrono::seconds(2);

bool Contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

std::int64_t SecondsOf(core::Duration patience) {
  return std::max<std::int64_t>(1, std::chrono::ceil<std::chrono::seconds>(patience).count());
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
  HostWish wish{input.options, input.launcher, input.self, folder, {}, patience, plan.wait};
  for (const char* name : {"PATH", "LD_LIBRARY_PATH"}) {
    auto value = input.environment.Find(name);
    for (const auto& [set, to] : plan.environment) {
      if (set == name) value = to;
    }
    if (value) wish.paths.emplace_back(name, *value);
  }
  return wish;
}

std::vector<std::string> AskingWords(const HostWish& wish, const std::string& host,
                                     const std::string& error) {
  std::vector<std::string> there = {"env"};
  for (const auto& [name, value] : wish.paths) {
    there.push_back(std::string(name).append("=").append(value));
  }
  there.insert(there.end(), {wish.self, std::string(kHostFlag), wish.folder, wish.launcher.path,
                             wish.options.program.front()});
  std::vector<std::string> words = {"ssh", "-n"};
  const std::vector<std::string> more = SshArguments(wish.options);
  words.insert(words.end(), more.begin(), more.end());
  // A new connection finds a host that has come up meanwhile sooner than one for which the kernel asks
  // ever more seldom. One that was answered may need all the time.
  const bool is_brief = wish.wait > core::Duration::zero() && !Contains(error, "banner exchange");
  const core::Duration patience = is_brief ? std::min(wish.patience, kBrief) : wish.patience;
  words.insert(words.end(), {"-o", "ConnectTimeout=" + std::to_string(SecondsOf(patience)), host,
                             ShellLine(there)});
  return words;
}

bool IsOutOfReach(const CommandOutcome& outcome) {
  return outcome.in_time && outcome.end.kind == EndKind::kExited && outcome.end.value == kOfSsh &&
         MayPass(outcome.error);
}

std::optional<std::string> JudgeHost(const HostWish& wish, const std::string& host,
                                     const HostReport& here, const CommandOutcome& outcome) {
  if (!outcome.why.empty()) return outcome.why + ": install an ssh client on this machine";
  if (!outcome.in_time) {
    return "no answer within " + core::DurationText(wish.patience) +
           " (--start-timeout): is it up, and does a firewall let ssh pass? By hand: " +
           SshByHand(wish.options, host);
  }
  const bool exited = outcome.end.kind == EndKind::kExited;
  if (!exited || outcome.end.value == kOfSsh) return JudgeSsh(wish.options, host, outcome.error);
  const auto there = ReadReport(outcome.output);
  if (!there || outcome.end.value != 0) return JudgeSilence(wish.self, outcome.end, outcome.error);
  return JudgeReport(wish, here, *there);
}

}  // namespace sirtaki::launch
