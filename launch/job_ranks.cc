#include "launch/job_ranks.h"

#include <algorithm>
#include <cstddef>

#include "core/rank_ranges.h"
#include "core/text.h"

namespace sirtaki::launch {

namespace {

// "ranks 1-2 have not … within 30 s": those of which it is so.
template <typename IsLate>
std::string LateText(const std::vector<Rank>& ranks, IsLate is_late, const std::string& what,
                     const HostList& hosts, core::Duration timeout) {
  core::RankRanges late;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (is_late(ranks[rank])) late.Add(static_cast<int>(rank));
  }
  const bool one = late.Count() == 1;
  return (one ? "rank " : "ranks ") + late.ToString() + (one ? " has" : " have") + " not " + what +
         " within " + core::DurationText(timeout) + " (hosts: " + HostsText(hosts) +
         "); --start-timeout sets how long it may take";
}

const Host* HostOf(int rank, const std::string& called, const Placement& placement) {
  if (const Host* host = HostOfRank(placement, rank)) return host;
  // With more ranks than slots the launcher chooses: as the rank calls its host.
  for (const Host& host : placement.hosts) {
    if (host.name == called) return &host;
  }
  return nullptr;
}

}  // namespace

Failure JudgeStart(const std::vector<Rank>& ranks, const HostList& hosts, core::Duration timeout) {
  const auto is_late = [](const Rank& rank) { return rank.hello.key.empty(); };
  return {1, LateText(ranks, is_late, "started", hosts, timeout), {}};
}

Failure JudgeInit(const std::vector<Rank>& ranks, const HostList& hosts, core::Duration timeout) {
  const auto is_late = [](const Rank& rank) { return !rank.through; };
  return {1,
          LateText(ranks, is_late, "come out of MPI_Init", hosts, timeout) +
              ", --network-interfaces over what MPI connects hosts",
          {}};
}

std::optional<Failure> JudgeLauncher(const std::vector<Rank>& ranks, bool begun,
                                     const std::string& launcher, const EndMessage& end) {
  const bool died = end.kind == EndKind::kSignalled;
  const std::string how = died ? " died of " + SignalName(end.value)
                               : " ended with exit code " + std::to_string(end.value);
  const int code = died ? 128 + end.value : std::max(1, end.value);
  if (!begun) {
    return Failure{
        code, launcher + how + " before all ranks had started: what it printed says why", {}};
  }
  const auto alive =
      std::find_if(ranks.begin(), ranks.end(), [](const Rank& rank) { return !rank.ended; });
  if (alive != ranks.end()) {
    const auto rank = static_cast<int>(alive - ranks.begin());
    return JudgeLoss(rank, alive->hello.host, launcher + how + " before it", {});
  }
  if (!died && end.value == 0) return std::nullopt;
  return Failure{code, launcher + how + ", though every rank ended with 0", {}};
}

std::vector<std::string> GoneHosts(const std::vector<Rank>& ranks, const Placement& placement,
                                   const std::string& own) {
  std::vector<std::string> names;
  for (const Host& host : placement.hosts) {
    bool gone = false;
    bool told = false;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const Rank& rank = ranks[i];
      if (HostOf(static_cast<int>(i), rank.hello.host, placement) != &host) continue;
      gone = gone || rank.gone;
      told = told || (rank.ended && !rank.lost) || rank.hello.host == own;
    }
    if (gone && !told) names.push_back(host.name);
  }
  return names;
}

}  // namespace sirtaki::launch
