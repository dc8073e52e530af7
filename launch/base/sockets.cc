#include "launch/base/sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "launch/base/shell_text.h"

namespace sirtaki::launch {

using core::Status;
using core::StatusCode;

namespace {

Status Failed(const char* what) {
  return {StatusCode::kBackend, std::string(what) + ": " + std::strerror(errno)};
}

sockaddr_in AddressOf(in_addr_t host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = host;
  return address;
}

const sockaddr* Generic(const sockaddr_in& address) {
  return reinterpret_cast<const sockaddr*>(&address);
}

std::string TextOf(const in_addr& address) {
  std::array<char, INET_ADDRSTRLEN> text{};
  return inet_ntop(AF_INET, &address, text.data(), text.size()) == nullptr ? "" : text.data();
}

void Set(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof(value));
}

// A host that is gone, or a link that is down, is noticed within about 12 s.
void WatchPeer(int fd) {
  Set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  Set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 4);
  Set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 2);
  Set(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
  Set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 12'000);
  Set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
}

template <typename Ask>
std::string EndOf(const Descriptor& connection, Ask ask) {
  sockaddr_in address{};
  socklen_t length = sizeof(address);
  if (ask(connection.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
  return address.sin_family == AF_INET ? TextOf(address.sin_addr) : "";
}

Transfer Ended(int error) {
  const bool silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
  return {0, true, std::strerror(error), silent};
}

// Connections that are being made, all at once.
class Attempts {
 public:
  explicit Attempts(std::string_view addresses) {
    for (const std::string_view text : Split(addresses, ',')) Begin(text);
  }

  Status Wait(core::TimePoint deadline, Descriptor* out) {
    while (!fds_.empty()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - core::Clock::now());
      if (left.count() <= 0) {
        return {StatusCode::kTimedOut, "no answer from " + Joined(names_, ", ")};
      }
      const int ready = poll(fds_.data(), fds_.size(), static_cast<int>(left.count()));
      if (ready < 0 && errno != EINTR) return Failed("poll");
      for (std::size_t i = ready > 0 ? fds_.size() : 0; i-- > 0;) {
        if (fds_[i].revents == 0) continue;
        const std::string why = ErrorOf(fds_[i].fd);
        if (why.empty()) {
          *out = std::move(sockets_[i]);
          return Status::Ok();
        }
        GiveUp(i, why);
      }
    }
    return {StatusCode::kBackend, Joined(failures_, ", ")};
  }

 private:
  void Begin(std::string_view text) {
    const std::size_t colon = text.find(':');
    const std::string host(text.substr(0, colon));
    in_addr address{};
    const auto port = NumberFrom<int>(text.substr(std::min(colon, text.size() - 1) + 1), 1, 65535);
    if (inet_pton(AF_INET, host.c_str(), &address) != 1 || !port) {
      failures_.push_back(std::string(text) + ": is not an address");
      return;
    }
    Descriptor socket_fd(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const sockaddr_in to = AddressOf(address.s_addr, *port);
    if (!socket_fd.valid() ||
        (connect(socket_fd.get(), Generic(to), sizeof(to)) != 0 && errno != EINPROGRESS)) {
      failures_.push_back(std::string(text) + ": " + std::strerror(errno));
      return;
    }
    WatchPeer(socket_fd.get());
    fds_.push_back({socket_fd.get(), POLLOUT, 0});
    sockets_.push_back(std::move(socket_fd));
    names_.emplace_back(text);
  }

  static std::string ErrorOf(int fd) {
    int error = 0;
    socklen_t length = sizeof(error);
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    return error == 0 ? "" : std::strerror(error);
  }

  void GiveUp(std::size_t i, const std::string& why) {
    const auto at = static_cast<std::ptrdiff_t>(i);
    failures_.push_back(names_[i] + ": " + why);
    fds_.erase(fds_.begin() + at);
    sockets_.erase(sockets_.begin() + at);
    names_.erase(names_.begin() + at);
  }

  std::vector<pollfd> fds_;
  std::vector<Descriptor> sockets_;
  std::vector<std::string> names_;
  std::vector<std::string> failures_;
};

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    Close();
    fd_ = other.Release();
  }
  return *this;
}

Descriptor::~Descriptor() { Close(); }

int Descriptor::Release() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

void Descriptor::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Status Listen(bool local, Descriptor* out, int* port) {
  Descriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!listener.valid()) return Failed("socket");
  sockaddr_in address = AddressOf(htonl(local ? INADDR_LOOPBACK : INADDR_ANY), 0);
  socklen_t length = sizeof(address);
  if (bind(listener.get(), Generic(address), sizeof(address)) != 0) return Failed("bind");
  if (listen(listener.get(), SOMAXCONN) != 0) return Failed("listen");
  getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length);
  *port = ntohs(address.sin_port);
  *out = std::move(listener);
  return Status::Ok();
}

Descriptor Accept(const Descriptor& listener) {
  Descriptor connection(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (connection.valid()) WatchPeer(connection.get());
  return connection;
}

Status ConnectToAny(std::string_view addresses, core::Duration timeout, Descriptor* out) {
  return Attempts(addresses).Wait(core::Clock::now() + timeout, out);
}

std::string PeerAddress(const Descriptor& connection) { return EndOf(connection, &getpeername); }

std::string OwnAddress(const Descriptor& connection) { return EndOf(connection, &getsockname); }

int FreePort() {
  Descriptor listener;
  int port = 0;
  return Listen(/*local=*/false, &listener, &port).ok() ? port : 0;
}

std::string HostName() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

std::string RandomKey() {
  std::array<unsigned char, 16> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) return "";
  std::string key;
  for (const unsigned char byte : bytes) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    key += kDigits[byte >> 4U];
    key += kDigits[byte & 0xFU];
  }
  return key;
}

Transfer ReadSome(int fd, std::string* out, std::size_t most) {
  std::array<char, kReadSize> buffer;
  const ssize_t got = read(fd, buffer.data(), std::min(most, buffer.size()));
  if (got > 0) {
    out->append(buffer.data(), static_cast<std::size_t>(got));
    return {static_cast<std::size_t>(got), false, "", false};
  }
  if (got == 0) return {0, true, "", false};
  if (errno == EAGAIN || errno == EINTR) return {};
  return Ended(errno);
}

Transfer WriteSome(int fd, std::string_view bytes) {
  const ssize_t put = write(fd, bytes.data(), bytes.size());
  if (put >= 0) return {static_cast<std::size_t>(put), false, "", false};
  if (errno == EAGAIN || errno == EINTR) return {};
  if (errno == EPIPE) return {0, true, "", false};
  return Ended(errno);
}

}  // namespace sirtaki::launch
