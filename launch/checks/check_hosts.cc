#include "launch/checks/check_hosts.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/machine/cgroup.h"
#include "launch/base/descriptor.h"
#include "launch/checks/host_cache.h"

namespace sirtaki::launch {

namespace {

// So many ssh run at once: each takes a part of a core while it exchanges keys.
constexpr std::size_t kAtOnce = 64;

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
                      const core::EnvironmentView& env) {
  const std::string folder = wish.options.disable_cache ? "" : CacheFolder(env);
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
  const std::vector<CommandOutcome> outcomes =
      RunCommands(std::move(commands), wish.patience, kAtOnce, &found.signal);
  if (found.signal != 0) return found;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    if (const auto failure = JudgeHost(wish, asked[i], here, outcomes[i])) {
      found.failures.push_back("host " + asked[i] + ": " + *failure);
    } else {
      cache.Add(HostCache::KeyOf(wish, asked[i]));
    }
  }
  if (!folder.empty() && found.failures.size() < asked.size()) Keep(folder, path, cache.Text());
  return found;
}

}  // namespace sirtaki::launch
