// Over which networks the ranks of several hosts talk.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "launch/plan_parts.h"
#include "launch/words.h"

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
// still lead to the hosts, if any are named.
std::string Follow(const PlanInput& input, const Placement& placement, Networks* networks) {
  std::string why_not;
  for (const Host& host : placement.hosts) {
    if (IsThisMachine(host.name, input.machine)) continue;
    const auto route = input.route(host.name);
    if (!route || !route->usable) {
      networks->interfaces.clear();
      return host.name +
             (route ? " is reached by " + route->interface : " is not known to this machine by name");
    }
    std::vector<std::string>& names = networks->interfaces;
    if (std::find(names.begin(), names.end(), route->interface) == names.end()) {
      names.push_back(route->interface);
    }
    if (networks->subnet.empty()) networks->subnet = route->subnet;
    if (!route->direct) why_not = host.name + " lies behind a router";
    if (networks->subnet != route->subnet) why_not = host.name + " lies in a network of its own";
  }
  return why_not;
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
    return networks;
  }
  if (!input.route) return networks;
  std::string why_not = Follow(input, placement, &networks);
  const std::string elsewhere = ChosenElsewhere(input);
  if (!why_not.empty()) networks.subnet.clear();
  if (!elsewhere.empty()) {
    networks.why_not = elsewhere + " does";
  } else if (why_not.empty()) {
    networks.include = networks.subnet;
    networks.why = "the route to the other hosts, by " + Joined(networks.interfaces, ", ");
  } else {
    // Bridges have the same addresses on many hosts, and lead to none of them.
    networks.exclude = "127.0.0.0/8,docker0,podman0,cni0,virbr0,lxcbr0,lxdbr0";
    networks.why = "never these; " + why_not + ", so no network is chosen";
  }
  return networks;
}

}  // namespace sirtaki::launch
