// Over which networks the ranks of several hosts talk.
#include <algorithm>
#include <string>
#include <vector>

#include "launch/base/shell_text.h"
#include "launch/plan/plan_impl.h"

namespace sirtaki::launch {

namespace {

bool IsAboutInterfaces(std::string_view text) {
  return text.find("_if_include") != std::string_view::npos ||
         text.find("_if_exclude") != std::string_view::npos;
}

// Where the user has chosen already, which Open MPI does not take beside another choice; empty if
// nowhere.
std::string ChosenElsewhere(const PlanInput& input) {
  for (const char* prefix : {"OMPI_MCA_", "PRTE_MCA_"}) {
    for (const std::string& name : input.environment.NamesWithPrefix(prefix)) {
      if (IsAboutInterfaces(name)) return name;
    }
  }
  for (const std::string& word : input.options.mpi_args) {
    if (IsAboutInterfaces(word)) return "--mpi-args " + word;
  }
  const std::string& path = input.launcher.path;
  const std::string bin = path.substr(0, std::min(path.rfind('/'), path.size()));
  for (const std::string& file :
       {input.environment.Find("HOME").value_or("") + "/.openmpi/mca-params.conf",
        bin + "/../etc/openmpi-mca-params.conf",
        std::string("/etc/openmpi/openmpi-mca-params.conf")}) {
    const std::string text = input.read(file).value_or("");
    for (const std::string_view line : Split(text, '\n')) {
      if (IsAboutInterfaces(line.substr(0, line.find('#')))) return file;
    }
  }
  return "";
}

// The network that all hosts share with this one. Why there is none, if so: then the interfaces
// still lead to the hosts, if any are named. `*bridges`: those of containers that hosts are reached
// by, which are then containers of this machine.
std::string Follow(const PlanInput& input, const Placement& placement, Networks* networks,
                   std::vector<std::string>* bridges) {
  std::string why_not;
  for (const Host& host : placement.hosts) {
    if (IsThisMachine(host.name, input.machine)) continue;
    const auto route = input.route(host.name);
    if (!route || !route->usable) {
      networks->interfaces.clear();
      why_not =
          host.name +
          (route ? " is reached by " + route->interface : " is not known to this machine by name");
      if (!route) return why_not;
      bridges->push_back(route->interface);
    }
    if (!bridges->empty()) continue;
    std::vector<std::string>& names = networks->interfaces;
    if (std::find(names.begin(), names.end(), route->interface) == names.end()) {
      names.push_back(route->interface);
    }
    if (networks->subnet.empty()) networks->subnet = route->subnet;
    if (!route->direct) why_not = host.name + " lies behind a router";
    if (networks->subnet != route->subnet) why_not = host.name + " lies in a network of its own";
  }
  if (why_not.empty() && networks->interfaces.empty()) why_not = "no other host is known yet";
  return why_not;
}

// Open MPI is to leave these alone: bridges have the same addresses on many hosts, and lead to none
// of them. Those of this machine by their networks, as other hosts may call them otherwise.
std::string ExcludedFromMpi(const ThisMachine& machine, const std::vector<std::string>& bridges) {
  std::vector<std::string> all = {"127.0.0.0/8"};
  const auto leads = [&bridges](const std::string& name) {
    return std::find(bridges.begin(), bridges.end(), name) != bridges.end();
  };
  for (const char* name : {"docker0", "podman0", "cni0", "virbr0", "lxcbr0", "lxdbr0"}) {
    if (!leads(name)) all.emplace_back(name);
  }
  for (const Interface& one : machine.interfaces) {
    const std::string subnet = SubnetOf(one);
    const bool is_new = std::find(all.begin(), all.end(), subnet) == all.end();
    if (is_new && IsOfContainers(one.name) && !leads(one.name)) all.push_back(subnet);
  }
  return Joined(all, ",");
}

// NCCL avoids networks by beginnings of names.
std::string AvoidedByNccl(const std::vector<std::string>& bridges) {
  std::vector<std::string> all = {"lo"};
  for (const std::string_view prefix : kOfContainers) {
    const bool leads =
        std::any_of(bridges.begin(), bridges.end(),
                    [prefix](const std::string& name) { return name.starts_with(prefix); });
    if (!leads) all.emplace_back(prefix);
  }
  return Joined(all, ",");
}

}  // namespace

Networks ChooseNetworks(const PlanInput& input, const Placement& placement) {
  Networks networks;
  if (placement.local) return networks;
  const std::vector<std::string>& given = input.options.network_interfaces;
  if (!given.empty()) {
    networks.interfaces = given;
    networks.include = Joined(given, ",");
    networks.why = "--network-interfaces";
    networks.text = networks.include + ", as --network-interfaces says";
    return networks;
  }
  if (!input.route) return networks;
  std::vector<std::string> bridges;
  const std::string why_not = Follow(input, placement, &networks, &bridges);
  const bool own = input.launcher.kind == LauncherKind::kOwn;
  const std::string elsewhere = own ? "" : ChosenElsewhere(input);
  if (why_not.empty()) {
    networks.text = networks.subnet + " by " + Joined(networks.interfaces, ", ");
  } else {
    networks.subnet.clear();
    networks.avoided = AvoidedByNccl(bridges);
    networks.text =
        std::string("left to ") + (own ? "Sirtaki" : "MPI") + " and NCCL, as " + why_not;
  }
  if (!elsewhere.empty()) {
    networks.why_not = elsewhere + " does";
    networks.text += "; " + elsewhere + " says what MPI uses";
  } else if (why_not.empty()) {
    networks.include = networks.subnet;
    networks.why = "the route to the other hosts, by " + Joined(networks.interfaces, ", ");
  } else {
    networks.exclude = ExcludedFromMpi(input.machine, bridges);
    networks.why = why_not + "; these are excluded, and MPI chooses among the rest";
  }
  return networks;
}

}  // namespace sirtaki::launch
