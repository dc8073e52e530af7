#include "launch/job/leftovers.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <system_error>

#include "core/machine/cgroup.h"
#include "launch/base/shell_text.h"

namespace sirtaki::launch {

namespace {

constexpr int kMostLooks =
    10;  // for what those to be killed start, with some patience for the dead

// Open MPI calls this host by its name without the domain, unless mpirun was told to keep it.
std::string_view NameOf(std::string_view host, const core::EnvironmentView& env) {
  const bool is_whole = env.Find("OMPI_MCA_orte_keep_fqdn_hostnames") == "1";
  return IsAddress(host) || is_whole ? host : host.substr(0, host.find('.'));
}

std::uint32_t HashOf(std::string_view name) {
  std::uint32_t hash = 0;  // Jenkins' one-at-a-time
  for (const char c : name) {
    hash += static_cast<unsigned char>(c);
    hash += hash << 10;
    hash ^= hash >> 6;
  }
  hash += hash << 3;
  hash ^= hash >> 11;
  hash += hash << 15;
  return hash;
}

// The number that Open MPI 5 makes of a job's name, "prterun-host-123@1": a hash of what stands
// before the @, its halves folded into one, then what stands behind.
std::uint32_t JobOf(std::string_view name) {
  const std::size_t at = std::min(name.rfind('@'), name.size());
  const std::uint32_t hash = HashOf(name.substr(0, at));
  const std::string_view number = name.substr(std::min(at + 1, name.size()));
  return (hash ^ hash >> 16) << 16 | NumberFrom<std::uint32_t>(number, 0, 0xffff).value_or(0);
}

// The one that Open MPI 4 makes of a job which is not its own launcher's, "slurm.pmix.1.0".
std::uint32_t ForeignJobOf(std::string_view name) { return HashOf(name) & ~0x8000U; }

std::vector<pid_t> OthersOfGroup() {
  std::vector<pid_t> others;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const auto process =
        NumberFrom<pid_t>(entry.path().filename().string(), 1, std::numeric_limits<pid_t>::max());
    if (process && *process != getpid() && getpgid(*process) == getpgrp())
      others.push_back(*process);
  }
  return others;
}

bool Catches(pid_t process, int signal) {
  const std::string status =
      core::ReadFile("/proc/" + std::to_string(process) + "/status").value_or("");
  const auto has = [&](const std::string& mask) {
    const std::size_t at = status.find("\n" + mask + ":\t");
    if (at == std::string::npos) return false;
    const char* const digits = status.c_str() + at + mask.size() + 3;
    return (std::strtoull(digits, nullptr, 16) >> (signal - 1) & 1) != 0;
  };
  return has("SigCgt") || has("SigBlk");
}

}  // namespace

std::vector<std::string> SegmentPrefixes(const core::EnvironmentView& env, std::string_view host,
                                         unsigned user) {
  if (host.empty()) return {};
  const auto prefix = [&](std::string_view kind, std::uint32_t job) {
    std::array<char, 16> hexadecimal{};
    std::snprintf(hexadecimal.data(), hexadecimal.size(), "%x", job);
    return std::string(kind) + "." + std::string(NameOf(host, env)) + "." + std::to_string(user) +
           "." + hexadecimal.data() + ".";
  };
  // The names are those that opal/mca/btl of Open MPI makes, vader of 4 and sm of 5: host without
  // its domain, user, job in hexadecimal, local rank.
  if (const auto text = env.Find("OMPI_MCA_ess_base_jobid")) {
    const auto job = NumberFrom<std::uint32_t>(*text, 1, std::numeric_limits<std::uint32_t>::max());
    if (!job) return {};
    return {prefix("vader_segment", *job)};
  }
  const auto name = env.Find("PMIX_NAMESPACE");
  if (!name) return {};
  std::vector<std::string> prefixes = {prefix("sm_segment", JobOf(*name))};
  // A name without @ is not of Open MPI 5's launcher: srun's, which starts either.
  if (name->find('@') == std::string::npos)
    prefixes.push_back(prefix("vader_segment", ForeignJobOf(*name)));
  return prefixes;
}

void RemoveSegments(const std::string& folder, std::string_view prefix) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (!entry.path().filename().string().starts_with(prefix)) continue;
    std::error_code gone;  // another rank may have been faster
    std::filesystem::remove(entry.path(), gone);
  }
}

void KillOthersOfGroup() {
  bool found = true;
  for (int look = 0; found && look < kMostLooks; ++look) {
    found = false;
    for (const pid_t process : OthersOfGroup()) found = kill(process, SIGKILL) == 0 || found;
  }
}

void SignalOthersThatCatch(int signal) {
  for (const pid_t process : OthersOfGroup()) {
    if (Catches(process, signal)) kill(process, signal);
  }
}

void AdoptOrphans() { prctl(PR_SET_CHILD_SUBREAPER, 1UL, 0UL, 0UL, 0UL); }

void EndOrphans(std::string_view name) {
  const std::string self = std::to_string(getpid());
  const std::string told = std::string(name) + '\n';
  const std::string children =
      core::ReadFile("/proc/" + self + "/task/" + self + "/children").value_or("");
  for (const std::string_view word : Words(children)) {
    const auto pid = NumberFrom<pid_t>(word, 1, std::numeric_limits<pid_t>::max());
    if (pid && core::ReadFile("/proc/" + std::string(word) + "/comm") == told) kill(*pid, SIGTERM);
  }
}

}  // namespace sirtaki::launch
