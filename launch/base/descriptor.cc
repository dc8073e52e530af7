#include "launch/base/descriptor.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace sirtaki::launch {

namespace {

Transfer Failed(int error) {
  if (error == EAGAIN || error == EINTR) return {};
  const bool silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
  const auto code = silent ? core::StatusCode::kTimedOut : core::StatusCode::kBackend;
  return {0, true, {code, std::strerror(error)}};
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

int Descriptor::Release() { return std::exchange(fd_, -1); }

void Descriptor::Close() {
  if (fd_ >= 0) close(Release());
}

Transfer ReadSome(int fd, std::string* out, std::size_t most) {
  std::array<char, kReadSize> buffer;
  const ssize_t got = read(fd, buffer.data(), std::min(most, buffer.size()));
  if (got < 0) return Failed(errno);
  out->append(buffer.data(), static_cast<std::size_t>(got));
  return {static_cast<std::size_t>(got), got == 0, {}};
}

Transfer WriteSome(int fd, std::string_view bytes) {
  const ssize_t put = write(fd, bytes.data(), bytes.size());
  if (put >= 0) return {static_cast<std::size_t>(put), false, {}};
  if (errno == EPIPE) return {0, true, {}};
  return Failed(errno);
}

}  // namespace sirtaki::launch
