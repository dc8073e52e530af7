// Connections between threads that act as ranks: each has one to each other.
#pragma once

#include <sys/socket.h>

#include <array>
#include <string>
#include <vector>

#include "core/base/check.h"
#include "core/base/descriptor.h"
#include "tcp/line.h"

namespace sirtaki::tests {

// By rank, then by the other rank.
inline std::vector<std::vector<tcp::Line>> LinesOfAll(int size) {
  const auto count = static_cast<std::size_t>(size);
  std::vector<std::vector<tcp::Line>> lines(count);
  for (auto& of_rank : lines) of_rank.resize(count);
  for (std::size_t one = 0; one < count; ++one) {
    for (std::size_t other = one + 1; other < count; ++other) {
      std::array<int, 2> ends{};
      const int made =
          socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data());
      SIRTAKI_CHECK(made == 0, "a pair of sockets");
      lines[one][other] = tcp::Line(core::Descriptor(ends[0]));
      lines[other][one] = tcp::Line(core::Descriptor(ends[1]));
    }
  }
  return lines;
}

inline std::vector<std::string> HostsOf(int size) {
  std::vector<std::string> hosts;
  for (int rank = 0; rank < size; ++rank) hosts.push_back("host" + std::to_string(rank));
  return hosts;
}

}  // namespace sirtaki::tests
