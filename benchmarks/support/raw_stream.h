// The reference between hosts: what an all-reduce has to send over each host's network, and nothing
// else. The first rank of every host streams to that of the next host, by a connection of plain TCP
// for each direction.
#pragma once

#include <arpa/inet.h>
#include <mpi.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/base/descriptor.h"

namespace sirtaki::benchmarks {

class RawStream {
 public:
  // Collective. `bytes`: of the vector. The hosts have to know each other by name.
  explicit RawStream(std::int64_t bytes) {
    MPI_Comm here = MPI_COMM_NULL;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here);
    int local_rank = 0;
    MPI_Comm_rank(here, &local_rank);
    MPI_Comm_free(&here);
    MPI_Comm across = MPI_COMM_NULL;  // the first ranks of the hosts; null: this one is none
    MPI_Comm_split(MPI_COMM_WORLD, local_rank == 0 ? 0 : MPI_UNDEFINED, 0, &across);
    if (across == MPI_COMM_NULL) return;
    MPI_Comm_size(across, &hosts_);
    if (hosts_ > 1) Connect(across);
    MPI_Comm_free(&across);
    given_.resize(static_cast<std::size_t>(bytes * 2 * (hosts_ - 1) / hosts_));
    taken_.resize(given_.size());
  }

  // Whether there are several hosts. The same on all ranks.
  bool crosses() const {
    int hosts = hosts_;
    MPI_Allreduce(MPI_IN_PLACE, &hosts, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    return hosts > 1;
  }

  void Stream() {
    std::size_t sent = 0;
    std::size_t taken = 0;
    while (sent < given_.size() || taken < taken_.size()) {
      // A number below 0 is left out.
      std::array<pollfd, 2> lines{{{sent < given_.size() ? next_.get() : -1, POLLOUT, 0},
                                   {taken < taken_.size() ? previous_.get() : -1, POLLIN, 0}}};
      Check(poll(lines.data(), lines.size(), -1) > 0, "poll");
      if (lines[0].revents != 0) {
        sent += Moved(::send(next_.get(), given_.data() + sent, given_.size() - sent,
                             MSG_DONTWAIT | MSG_NOSIGNAL));
      }
      if (lines[1].revents != 0) {
        taken += Moved(
            ::recv(previous_.get(), taken_.data() + taken, taken_.size() - taken, MSG_DONTWAIT));
      }
    }
  }

 private:
  struct Place {
    std::array<char, 256> host{};
    in_port_t port = 0;
  };

  static void Check(bool good, const char* what) {
    if (!good) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
  }
  static std::size_t Moved(ssize_t bytes) {
    if (bytes < 0 && errno == EAGAIN) return 0;
    Check(bytes > 0, "the raw stream");
    return static_cast<std::size_t>(bytes);
  }

  void Connect(MPI_Comm across) {
    int host = 0;
    MPI_Comm_rank(across, &host);
    const core::Descriptor listener(socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in end{};
    end.sin_family = AF_INET;
    socklen_t length = sizeof(end);
    auto* const address = reinterpret_cast<sockaddr*>(&end);
    Check(bind(listener.get(), address, length) == 0 && listen(listener.get(), 1) == 0 &&
              getsockname(listener.get(), address, &length) == 0,
          "listen");
    Place mine;
    gethostname(mine.host.data(), mine.host.size() - 1);
    mine.port = end.sin_port;
    std::vector<Place> all(static_cast<std::size_t>(hosts_));
    MPI_Allgather(&mine, sizeof(mine), MPI_BYTE, all.data(), sizeof(mine), MPI_BYTE, across);
    const Place& next = all[static_cast<std::size_t>((host + 1) % hosts_)];
    addrinfo hints{};
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int error = getaddrinfo(next.host.data(), nullptr, &hints, &found);
    if (error != 0) {
      throw std::runtime_error(std::string("host ") + next.host.data() + ": " +
                               gai_strerror(error));
    }
    std::memcpy(&end, found->ai_addr, sizeof(end));
    freeaddrinfo(found);
    end.sin_port = next.port;
    next_ = core::Descriptor(socket(AF_INET, SOCK_STREAM, 0));
    Check(connect(next_.get(), address, sizeof(end)) == 0, next.host.data());
    previous_ = core::Descriptor(accept(listener.get(), nullptr, nullptr));
    Check(previous_.valid(), "accept");
  }

  int hosts_ = 0;
  core::Descriptor next_;
  core::Descriptor previous_;
  std::vector<char> given_;  // empty but on the first rank of a host
  std::vector<char> taken_;
};

}  // namespace sirtaki::benchmarks
