// A file descriptor, and the bytes that go through it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "core/base/status.h"

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

// What happened to bytes on a connection or pipe that does not block.
struct Transfer {
  std::size_t bytes = 0;
  bool ended = false;  // the other side has closed, or there was an error
  core::Status why;    // the error; kTimedOut: the other host does not answer
};
inline constexpr std::size_t kReadSize = std::size_t{64} * 1024;
Transfer ReadSome(int fd, std::string* out, std::size_t most = kReadSize);
Transfer WriteSome(int fd, std::string_view bytes);

}  // namespace sirtaki::launch
