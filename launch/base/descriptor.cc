#include "launch/base/descriptor.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace sirtaki::launch {

namespace {

Transfer Failed(int error) {
  if (error == EAGAIN || error == EINTR) return {};
  const bool silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
  const auto code = silent ? core::StatusCode::kTimedOut : core::StatusCode::kBackend;
  return {0, true, {code, std::strerror(error)}};
}

}  // namespace

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
