#include "launch/checks/check_hosts.h"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "core/base/text.h"
#include "core/base/types.h"
#include "core/machine/cgroup.h"
#include "launch/base/descriptor.h"
#include "launch/base/run_commands.h"
#include "launch/checks/host_cache.h"
#include "launch/plan/ssh_failure.h"

namespace sirtaki::launch {

namespace {

// So many ssh run at once: each takes a part of a core while it exchanges keys.
constexpr std::size_t kAtOnce = 64;
// Between two questions to a host that is out of reach: more hosts are asked less often.
constexpr auto kAskAgain = std::chrono::milliseconds(100);
constexpr auto kAskAgainForEach = std::chrono::milliseconds(5);

// The folder of the cache; empty if there is no place for one.
std::string CacheFolder(const core::EnvironmentView& env) {
  // A relative path is passed over, as the specification of XDG_CACHE_HOME has it.
  if (const auto folder = env.Find("XDG_CACHE_HOME"); folder && folder->starts_with('/')) {
    return *folder + "/sirtaki";
  }
  const auto home = env.Find("HOME");
  return home ? *home + "/.cache/sirtaki" : "";
}

// Somebody who reads at the same time sees the old text or the new one.
void Keep(const std::string& folder, const std::string& path, const std::string& text) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  std::string scratch = path + ".XXXXXX";
  const Descriptor file(mkostemp(scratch.data(), O_CLOEXEC));
  if (!file.valid()) return;
  const bool whole = WriteSome(file.get(), text).bytes == text.size();
  if (!whole || std::rename(scratch.c_str(), path.c_str()) != 0) unlink(scratch.c_str());
}

}  // namespace

HostsFound CheckHosts(const HostWish& wish, const std::vector<std::string>& hosts,
                      const core::EnvironmentView& env,
                      const std::function<void(const std::string&)>& tell) {
  const bool waits = wish.wait > core::Duration::zero();
  // A host that is to be waited for may have been fit, and be starting anew.
  const std::string folder = wish.options.disable_cache || waits ? "" : CacheFolder(env);
  const std::string path = folder + "/hosts";
  HostCache cache(folder.empty() ? "" : core::ReadFile(path).value_or(""), std::time(nullptr));
  std::vector<std::string> asked;
  std::vector<Command> commands;
  for (const std::string& host : hosts) {
    if (cache.Knows(HostCache::KeyOf(wish, host))) continue;
    asked.push_back(host);
    commands.push_back({AskingWords(wish, host), {}, {}});
  }
  HostsFound found;
  if (asked.empty()) return found;
  const HostReport here =
      LookAtHost(wish.folder, wish.launcher.path, wish.options.program.front(), env);
  const core::TimePoint until = core::Clock::now() + wish.wait;
  bool told = false;
  bool in_vain = false;  // some host is not fit
  const RunAgain again = [&](std::size_t i, const CommandOutcome& outcome,
                             Command* command) -> std::optional<core::Duration> {
    const std::string& host = asked[i];
    if (!IsOutOfReach(outcome)) in_vain = in_vain || JudgeHost(wish, host, here, outcome);
    if (in_vain || !IsOutOfReach(outcome) || core::Clock::now() >= until) return std::nullopt;
    if (!std::exchange(told, true)) {
      tell("waiting up to " + core::DurationText(wish.wait) +
           " for hosts that do not answer yet; " + host + ": " + LastLine(outcome.error));
    }
    command->words = AskingWords(wish, host, outcome.error);
    return kAskAgain + kAskAgainForEach * asked.size();
  };
  const std::vector<CommandOutcome> outcomes = RunCommands(
      std::move(commands), wish.patience, kAtOnce, &found.signal, waits ? again : RunAgain{});
  if (found.signal != 0) return found;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    if (const auto failure = JudgeHost(wish, asked[i], here, outcomes[i])) {
      found.failures.push_back("host " + asked[i] + ": " + *failure);
      if (waits && !in_vain && IsOutOfReach(outcomes[i])) {
        found.failures.back() +=
            "; it was waited for, " + core::DurationText(wish.wait) + " (--wait-for-hosts)";
      }
    } else {
      cache.Add(HostCache::KeyOf(wish, asked[i]));
    }
  }
  if (!folder.empty() && found.failures.size() < asked.size()) Keep(folder, path, cache.Text());
  return found;
}

}  // namespace sirtaki::launch
