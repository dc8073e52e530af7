#include "launch/plan/routes.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <memory>

#include "launch/base/descriptor.h"
#include "launch/base/shell_text.h"

namespace sirtaki::launch {

namespace {

std::uint32_t NumberOf(const sockaddr* generic) {
  sockaddr_in address{};
  std::memcpy(&address, generic, sizeof(address));
  return ntohl(address.sin_addr.s_addr);
}

std::string TextOf(std::uint32_t number) {
  const in_addr address{htonl(number)};
  std::array<char, INET_ADDRSTRLEN> text{};
  return inet_ntop(AF_INET, &address, text.data(), text.size()) == nullptr ? "" : text.data();
}

// This machine's address on the way to the other; none if there is no way.
std::optional<std::uint32_t> SourceFor(const sockaddr_in& to) {
  const Descriptor socket_fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_in own{};
  socklen_t length = sizeof(own);
  auto* const generic = reinterpret_cast<sockaddr*>(&own);
  if (connect(socket_fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0 ||
      getsockname(socket_fd.get(), generic, &length) != 0) {
    return std::nullopt;
  }
  return NumberOf(generic);
}

}  // namespace

std::vector<Interface> OwnInterfaces() {
  std::vector<Interface> interfaces;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return interfaces;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(first, &freeifaddrs);
  for (const ifaddrs* one = first; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET) continue;
    if (one->ifa_netmask == nullptr || (one->ifa_flags & IFF_UP) == 0U) continue;
    interfaces.push_back({one->ifa_name, NumberOf(one->ifa_addr), NumberOf(one->ifa_netmask),
                          (one->ifa_flags & IFF_LOOPBACK) != 0U});
  }
  return interfaces;
}

bool IsOfContainers(std::string_view interface) {
  return std::any_of(kOfContainers.begin(), kOfContainers.end(),
                     [&](std::string_view prefix) { return interface.starts_with(prefix); });
}

std::string AddressOf(const Interface& interface) { return TextOf(interface.address); }

std::string SubnetOf(const Interface& interface) {
  return TextOf(interface.address & interface.mask) + "/" +
         std::to_string(std::popcount(interface.mask));
}

bool IsIn(std::uint32_t address, std::string_view subnet) {
  const std::size_t slash = subnet.find('/');
  if (slash == std::string_view::npos) return false;
  const auto bits = NumberFrom<int>(subnet.substr(slash + 1), 0, 32);
  if (!bits) return false;
  const std::uint32_t mask = *bits == 0 ? 0 : ~std::uint32_t{0} << (32 - *bits);
  return TextOf(address & mask) == subnet.substr(0, slash);
}

std::vector<std::string> OwnAddresses(const std::vector<std::string>& interfaces) {
  std::vector<std::string> addresses;
  for (const Interface& one : OwnInterfaces()) {
    const bool named =
        std::find(interfaces.begin(), interfaces.end(), one.name) != interfaces.end();
    if (one.loopback || !(interfaces.empty() ? !IsOfContainers(one.name) : named)) continue;
    addresses.push_back(AddressOf(one));
  }
  return addresses;
}

std::vector<std::string> InterfacesIn(std::string_view subnet) {
  std::vector<std::string> names;
  for (const Interface& one : OwnInterfaces()) {
    const bool is_new = std::find(names.begin(), names.end(), one.name) == names.end();
    if (is_new && !one.loopback && IsIn(one.address, subnet)) names.push_back(one.name);
  }
  return names;
}

std::string HostName() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

std::string FullNameOf(const std::string& host) {
  addrinfo hints{};
  hints.ai_flags = AI_CANONNAME;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* first = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &first) != 0) return host;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> all(first, &freeaddrinfo);
  return first->ai_canonname == nullptr ? host : first->ai_canonname;
}

std::optional<Route> FindRoute(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* first = nullptr;
  // Any port: nothing is sent.
  if (getaddrinfo(host.c_str(), "9", &hints, &first) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> all(first, &freeaddrinfo);
  sockaddr_in to{};
  std::memcpy(&to, first->ai_addr, sizeof(to));
  const auto source = SourceFor(to);
  if (!source) return std::nullopt;
  for (const Interface& one : OwnInterfaces()) {
    if (one.address != *source) continue;
    const std::string subnet = SubnetOf(one);
    return Route{one.name, subnet, IsIn(ntohl(to.sin_addr.s_addr), subnet),
                 !one.loopback && !IsOfContainers(one.name)};
  }
  return std::nullopt;
}

}  // namespace sirtaki::launch
