// The bytes that go through a file descriptor.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "core/base/descriptor.h"
#include "core/base/status.h"

namespace sirtaki::launch {

using core::Descriptor;

// A transfer is what happened to bytes on a connection or pipe that does not block.
struct Transfer {
  std::size_t bytes = 0;
  bool ended = false;  // the other side has closed, or there was an error
  core::Status why;    // the error; kTimedOut: the other host does not answer
};
inline constexpr std::size_t kReadSize = std::size_t{64} * 1024;
Transfer ReadSome(int fd, std::string* out, std::size_t most = kReadSize);
Transfer WriteSome(int fd, std::string_view bytes);

}  // namespace sirtaki::launch
