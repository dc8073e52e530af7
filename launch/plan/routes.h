// This machine's network interfaces, and by which of them it reaches other hosts. IPv4.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sirtaki::launch {

struct Interface {
  std::string name;
  std::uint32_t address = 0;  // in this machine's byte order
  std::uint32_t mask = 0;
  bool loopback = false;
};

// Those that are up and have an address; one with several comes several times.
std::vector<Interface> OwnInterfaces();

// How the names of bridges to containers begin, which other hosts do not reach.
inline constexpr std::array<std::string_view, 7> kOfContainers = {"docker", "br-",   "virbr", "cni",
                                                                  "podman", "lxcbr", "lxdbr"};
bool IsOfContainers(std::string_view interface);  // pure
// "10.0.0.7". Pure.
std::string AddressOf(const Interface& interface);
// "10.0.0.0/24". Pure.
std::string SubnetOf(const Interface& interface);
// Whether the address lies in the subnet, as SubnetOf writes it. Pure.
bool IsIn(std::uint32_t address, std::string_view subnet);

// Where others reach this machine, "10.0.0.1": of the interfaces named, or of all but the loopback
// and the bridges of containers.
std::vector<std::string> OwnAddresses(const std::vector<std::string>& interfaces);
// The names of those that have an address in the subnet.
std::vector<std::string> InterfacesIn(std::string_view subnet);

// This machine's name, as `hostname` says it.
std::string HostName();
// The name with its domain, "b.example.org", as the system knows it; the name itself if it knows no
// other.
std::string FullNameOf(const std::string& host);

struct Route {
  std::string interface;  // "eth0"
  std::string subnet;     // its own, "10.0.0.0/24"
  bool direct = false;    // the host is of this subnet: no router stands between
  bool usable = true;     // it is neither the loopback nor a bridge of containers
};
using RouteFinder = std::function<std::optional<Route>(const std::string& host)>;

// The route is the system's; nothing is sent to the host. None: the name is not known, or there is
// no way.
std::optional<Route> FindRoute(const std::string& host);

}  // namespace sirtaki::launch
