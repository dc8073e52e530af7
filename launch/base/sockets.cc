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
std::string EndOf(const Descriptor& connection, Ask ask, bool with_port = false) {
  sockaddr_in address{};
  socklen_t length = sizeof(address);
  if (ask(connection.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
  if (address.sin_family != AF_INET) return "";
  const std::string text = TextOf(address.sin_addr);
  return with_port ? text + ":" + std::to_string(ntohs(address.sin_port)) : text;
}

Transfer Ended(int error) {
  const bool silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
  return {0, true, std::strerror(error), silent};
}

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

Descriptor Accept(const Descriptor& listener, bool* no_room) {
  Descriptor connection(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (connection.valid()) WatchPeer(connection.get());
  if (no_room != nullptr) {
    *no_room = !connection.valid() &&
               (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM);
  }
  return connection;
}

Descriptor BeginToConnect(std::string_view address, std::string* why) {
  const std::size_t colon = address.find(':');
  const std::string host(address.substr(0, colon));
  in_addr number{};
  const auto port =
      NumberFrom<int>(address.substr(std::min(colon, address.size() - 1) + 1), 1, 65535);
  if (inet_pton(AF_INET, host.c_str(), &number) != 1 || !port) {
    *why = "is not an address";
    return {};
  }
  Descriptor fd(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const sockaddr_in to = AddressOf(number.s_addr, *port);
  if (!fd.valid() || (connect(fd.get(), Generic(to), sizeof(to)) != 0 && errno != EINPROGRESS)) {
    *why = std::strerror(errno);
    return {};
  }
  WatchPeer(fd.get());
  return fd;
}

std::string ConnectError(const Descriptor& connection) {
  int error = 0;
  socklen_t length = sizeof(error);
  getsockopt(connection.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error == 0 ? "" : std::strerror(error);
}

std::string PeerAddress(const Descriptor& connection) { return EndOf(connection, &getpeername); }

std::string OwnAddress(const Descriptor& connection) { return EndOf(connection, &getsockname); }

std::string OwnEndpoint(const Descriptor& connection) {
  return EndOf(connection, &getsockname, /*with_port=*/true);
}

int FreePort() {
  Descriptor listener;
  int port = 0;
  return Listen(/*local=*/false, &listener, &port).ok() ? port : 0;
}

std::string HostName() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

std::string RandomBytes(std::size_t count) {
  std::string bytes(count, '\0');
  const ssize_t got = getrandom(bytes.data(), count, 0);
  return got == static_cast<ssize_t>(count) ? bytes : "";
}

std::string RandomKey() {
  std::string key;
  for (const char byte : RandomBytes(16)) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    key += kDigits[static_cast<unsigned char>(byte) >> 4U];
    key += kDigits[static_cast<unsigned char>(byte) & 0xFU];
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
