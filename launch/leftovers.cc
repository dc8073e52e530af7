#include "launch/leftovers.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <system_error>

#include "launch/words.h"

namespace sirtaki::launch {

namespace {

constexpr int kMostLooks =
    10;  // for what those to be killed start, with some patience for the dead

std::string_view WithoutDomain(std::string_view host) {
  const bool is_address = host.find_first_not_of("0123456789.") == std::string_view::npos;
  return is_address ? host : host.substr(0, host.find('.'));
}

}  // namespace

std::optional<std::string> SegmentPrefix(const core::EnvironmentView& env, std::string_view host,
                                         unsigned user) {
  const auto text = env.Find("OMPI_MCA_ess_base_jobid");
  const auto job =
      NumberFrom<std::uint32_t>(text.value_or(""), 1, std::numeric_limits<std::uint32_t>::max());
  if (!job || host.empty()) return std::nullopt;
  // As opal/mca/btl/vader of Open MPI 4 makes them: host without its domain, user, job in
  // hexadecimal, local rank.
  std::array<char, 16> hexadecimal{};
  std::snprintf(hexadecimal.data(), hexadecimal.size(), "%x", *job);
  return "vader_segment." + std::string(WithoutDomain(host)) + "." + std::to_string(user) + "." +
         hexadecimal.data() + ".";
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
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
      const auto process =
          NumberFrom<pid_t>(entry.path().filename().string(), 1, std::numeric_limits<pid_t>::max());
      if (!process || *process == getpid() || getpgid(*process) != getpgrp()) continue;
      found = kill(*process, SIGKILL) == 0 || found;
    }
  }
}

}  // namespace sirtaki::launch
