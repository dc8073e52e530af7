// The connections between sirtakirun and its ranks: TCP, so that they reach other hosts.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/base/types.h"

namespace sirtaki::launch {

// A file descriptor that is closed with it.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.Release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release();
  void Close();

 private:
  int fd_ = -1;
};

// Listens on a free port: of the loopback alone if `local`. kBackend if that cannot be.
core::Status Listen(bool local, Descriptor* out, int* port);
// A connection that waits, not blocking; invalid if there is none, or if this process or the system
// has no room for one more, which then goes on waiting.
Descriptor Accept(const Descriptor& listener, bool* no_room = nullptr);

// A connection to "address:port" that is being made, not blocking: it can be written when it is, or
// cannot be. Invalid: `*why`.
Descriptor BeginToConnect(std::string_view address, std::string* why);
// Why it could not be made; empty if it was.
std::string ConnectError(const Descriptor& connection);
// The other end's address, "10.0.0.1", and this end's; empty if it is not known.
std::string PeerAddress(const Descriptor& connection);
std::string OwnAddress(const Descriptor& connection);
// This end's address and port, "10.0.0.1:4711"; empty if they are not known.
std::string OwnEndpoint(const Descriptor& connection);
// A port that is free now on this machine.
int FreePort();
// This machine's, as `hostname` says.
std::string HostName();
// Empty if the system has none to give.
std::string RandomBytes(std::size_t count);
// Tells those who know it from strangers: "3f0c…"; empty if the system has none to give.
std::string RandomKey();

// What happened to bytes on a connection or pipe that does not block.
struct Transfer {
  std::size_t bytes = 0;
  bool ended = false;   // the other side has closed, or an error
  std::string why;      // of an error
  bool silent = false;  // the error is that the other host does not answer
};
inline constexpr std::size_t kReadSize = std::size_t{64} * 1024;
Transfer ReadSome(int fd, std::string* out, std::size_t most = kReadSize);
Transfer WriteSome(int fd, std::string_view bytes);

}  // namespace sirtaki::launch
