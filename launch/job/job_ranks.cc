#include "launch/job/job_ranks.h"

#include <algorithm>
#include <cstddef>
#include <set>

#include "core/base/rank_ranges.h"
#include "core/base/text.h"

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

// "node1" and "node1.cluster" are one host where one of them has no domain.
bool SameName(const std::string& a, const std::string& b) {
  if (a == b) return true;
  const std::string& longer = a.size() > b.size() ? a : b;
  const std::string& shorter = a.size() > b.size() ? b : a;
  return longer.starts_with(shorter + ".") && shorter.find('.') == std::string::npos;
}

}  // namespace

const Host* HostOf(const std::vector<Rank>& ranks, std::size_t rank, const Placement& placement,
                   const std::string& own) {
  const HostList& hosts = placement.hosts;
  const auto find = [&hosts](const auto& is_it) -> const Host* {
    const auto host = std::find_if(hosts.begin(), hosts.end(), is_it);
    return host == hosts.end() ? nullptr : &*host;
  };
  const Rank& of = ranks[rank];
  const auto is_named = [&of](const Host& host) { return host.name == of.hello.host; };
  const auto is_there = [&of](const Host& host) { return host.name == of.address; };
  const auto is_here = [&](const Host& host) {
    return of.hello.host == own && host.name == "localhost";
  };
  const auto is_alike = [&of](const Host& host) { return SameName(host.name, of.hello.host); };
  if (const Host* host = find(is_named)) return host;
  if (const Host* host = find(is_there)) return host;
  if (const Host* host = find(is_here)) return host;
  if (const Host* host = find(is_alike)) return host;
  // It goes by another name in the plan: Open MPI and the others fill hosts one after the other.
  return HostOfRank(placement, static_cast<int>(rank));
}

Failure JudgeStart(const std::vector<Rank>& ranks, const HostList& hosts, core::Duration timeout) {
  const auto is_late = [](const Rank& rank) { return rank.hello.size == 0; };
  return {1, LateText(ranks, is_late, "started", hosts, timeout), {}};
}

Failure JudgeInit(const std::vector<Rank>& ranks, const HostList& hosts, core::Duration timeout) {
  const auto is_late = [](const Rank& rank) { return !rank.through; };
  return {1,
          LateText(ranks, is_late, "come out of MPI_Init", hosts, timeout) +
              ", --network-interfaces over which networks MPI connects hosts",
          {}};
}

std::optional<Failure> JudgeLauncher(const std::vector<Rank>& ranks, bool begun,
                                     const std::string& launcher, const EndMessage& end) {
  const bool died = end.kind == EndKind::kSignalled;
  const std::string how = " " + EndText(end);
  const int code = died ? 128 + end.value : std::max(1, end.value);
  if (!begun) {
    return Failure{
        code, launcher + how + " before all ranks had started: what it printed says why", {}};
  }
  const auto alive =
      std::find_if(ranks.begin(), ranks.end(), [](const Rank& rank) { return !rank.ended; });
  if (alive != ranks.end()) {
    const auto rank = static_cast<int>(alive - ranks.begin());
    return JudgeLoss(rank, alive->hello.host, launcher + how + " before the rank did", true, {});
  }
  if (!died) return std::nullopt;
  return Failure{code, launcher + how + ", though every rank ended with 0", {}};
}

Failure JudgeKilledLauncher(const std::string& launcher, const EndMessage& end) {
  return {128 + end.value,
          launcher + " died of " + SignalName(end.value) + ", and the ranks with it",
          {}};
}

std::vector<std::string> GoneHosts(const std::vector<Rank>& ranks, const Placement& placement,
                                   const std::string& own) {
  std::set<const Host*> gone;
  std::set<const Host*> told;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const Rank& rank = ranks[i];
    const Host* const host = HostOf(ranks, i, placement, own);
    if (rank.gone) gone.insert(host);
    if ((rank.ended && !rank.lost) || rank.hello.host == own) told.insert(host);
  }
  std::vector<std::string> names;
  for (const Host& host : placement.hosts) {
    if (gone.contains(&host) && !told.contains(&host)) names.push_back(host.name);
  }
  return names;
}

}  // namespace sirtaki::launch
