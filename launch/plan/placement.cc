#include "launch/plan/placement.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <utility>

#include "core/base/text.h"
#include "launch/base/shell_text.h"

namespace sirtaki::launch {

using core::Quoted;
using core::Status;
using core::StatusCode;

namespace {

Status WrongPlace(const std::string& text) { return {StatusCode::kInvalidArgument, text}; }

Status ChooseHosts(const LaunchOptions& options, const core::FileReader& read,
                   const Allocation& allocation, const ThisMachine& machine, Placement* placement) {
  if (!options.hosts.empty()) {
    placement->from = "--hosts";
    return ParseHosts(options.hosts, options.Called("hosts"), &placement->hosts);
  }
  if (!options.hostfile.empty()) {
    placement->from = "--hostfile " + options.hostfile;
    const auto text = read(options.hostfile);
    if (!text) {
      return WrongPlace(options.Called("hostfile") + ": " + Quoted(options.hostfile) +
                        " cannot be read");
    }
    return ParseHostFile(*text, options.hostfile, &placement->hosts);
  }
  if (allocation.system != BatchSystem::kNone) {
    placement->from = allocation.from;
    placement->hosts = allocation.hosts;
    return Status::Ok();
  }
  placement->from = "no host was named: this machine, a slot for each core";
  placement->hosts = {{"localhost", machine.cores, {}}};
  if (options.np == 0) {
    return WrongPlace("the number of ranks is not given: say -np N, or name hosts with -H");
  }
  return Status::Ok();
}

Status RemoveGone(const std::vector<std::string>& gone, Placement* placement) {
  std::erase_if(placement->hosts, [&](const Host& host) {
    return std::find(gone.begin(), gone.end(), host.name) != gone.end();
  });
  if (placement->hosts.empty()) return WrongPlace("no host is left; lost: " + Joined(gone, ", "));
  if (!gone.empty()) placement->from += ", without " + Joined(gone, ", ");
  return Status::Ok();
}

Status ChooseRanks(const LaunchOptions& options, bool some_gone, Placement* placement) {
  const int slots = SlotsOf(placement->hosts);
  placement->ranks = options.np == 0 ? slots : options.np;
  placement->ranks_from = options.np == 0 ? "one for each slot" : "as asked for";
  if (some_gone && placement->ranks > slots && !options.oversubscribe) {
    placement->ranks = slots;
    placement->ranks_from = "one for each slot that is left";
  }
  placement->oversubscribed = placement->ranks > slots;
  if (placement->oversubscribed && !options.oversubscribe) {
    return WrongPlace(std::to_string(placement->ranks) + " ranks are more than the " +
                      CountText(slots, "slot") + " of " + HostsText(placement->hosts) + " (" +
                      placement->from + "); --oversubscribe allows it");
  }
  // Hosts are filled one after the other: those behind the last rank have none.
  int before = 0;
  auto end = placement->hosts.begin();
  while (end != placement->hosts.end() && before < placement->ranks) before += (end++)->slots;
  placement->hosts.erase(end, placement->hosts.end());
  return Status::Ok();
}

// Names of hosts are the same in capital letters.
bool AreSameNames(std::string_view a, std::string_view b) {
  const auto lower = [](unsigned char c) { return std::tolower(c); };
  return std::ranges::equal(a, b, {}, lower, lower);
}

}  // namespace

bool IsThisMachine(std::string_view host, const ThisMachine& machine) {
  if (AreSameNames(host, "localhost") || host.starts_with("127.")) return true;
  const std::string_view own = machine.name;
  const std::string_view full = machine.full_name;
  return AreSameNames(host, own) || AreSameNames(host, own.substr(0, own.find('.'))) ||
         AreSameNames(host, full) ||
         (full.substr(std::min(host.size(), full.size())).starts_with('.') &&
          AreSameNames(host, full.substr(0, host.size()))) ||
         std::any_of(machine.interfaces.begin(), machine.interfaces.end(),
                     [host](const Interface& one) { return host == AddressOf(one); });
}

const Host* HostOfRank(const Placement& placement, int rank) {
  if (placement.oversubscribed) return nullptr;
  for (const Host& host : placement.hosts) {
    if (rank < host.slots) return &host;
    rank -= host.slots;
  }
  return nullptr;
}

std::vector<int> RanksOfHosts(const Placement& placement) {
  const std::int64_t slots = SlotsOf(placement.hosts);
  std::vector<int> counts;
  std::int64_t before = 0;  // slots
  int given = 0;
  for (const Host& host : placement.hosts) {
    before += host.slots;
    const std::int64_t up_to = placement.oversubscribed
                                   ? (before * placement.ranks + slots - 1) / slots
                                   : std::min<std::int64_t>(before, placement.ranks);
    counts.push_back(static_cast<int>(up_to) - given);
    given = static_cast<int>(up_to);
  }
  return counts;
}

Status Place(const LaunchOptions& options, const core::EnvironmentView& env,
             const core::FileReader& read, const ThisMachine& machine,
             const std::vector<std::string>& gone, Placement* out) {
  Placement placement;
  const bool named = !options.hosts.empty() || !options.hostfile.empty();
  Allocation allocation;
  Status status = FindAllocation(env, read, &allocation);
  if (!status.ok() && !named) return status;
  placement.system = allocation.system;
  placement.allocated = allocation.hosts;
  status = ChooseHosts(options, read, allocation, machine, &placement);
  if (status.ok() && !options.include.empty()) {
    status = FilterHosts(options.include, true, options.Called("include"), &placement.hosts);
  }
  if (status.ok() && !options.exclude.empty()) {
    status = FilterHosts(options.exclude, false, options.Called("exclude"), &placement.hosts);
  }
  if (status.ok()) status = RemoveGone(gone, &placement);
  if (status.ok()) status = ChooseRanks(options, !gone.empty(), &placement);
  if (!status.ok()) return status;
  const bool some_devices = std::any_of(placement.hosts.begin(), placement.hosts.end(),
                                        [](const Host& host) { return !host.devices.empty(); });
  if (some_devices && placement.oversubscribed) {
    return WrongPlace(
        "--oversubscribe cannot be given where only some slots of a host were chosen");
  }
  // A script may name other hosts later.
  placement.local =
      options.host_discovery_script.empty() &&
      std::all_of(placement.hosts.begin(), placement.hosts.end(),
                  [&](const Host& host) { return IsThisMachine(host.name, machine); });
  *out = std::move(placement);
  return Status::Ok();
}

}  // namespace sirtaki::launch
