// The signals that this process gets.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/status.h"

namespace sirtaki::launch {

// Signals become bytes of a pipe, so that one poll waits for everything. There is one of a process.
class SignalPipe {
 public:
  enum class User : std::uint8_t { kIgnored, kTaken };
  // SIGINT, SIGTERM, SIGCHLD, and SIGHUP unless it is ignored. SIGUSR1 and SIGUSR2 are taken too,
  // or do nothing (where the program gets them as well). A closed pipe is no signal.
  static core::Status Open(User user = User::kIgnored);
  static int fd();
  // The signals that have come since.
  static std::vector<int> Take();
  // They end this process again, as does one that came and was not taken.
  static void Close();
};

}  // namespace sirtaki::launch
