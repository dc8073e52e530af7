// A process that this one starts, and the signals that this one gets meanwhile.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"
#include "launch/rank_messages.h"
#include "launch/sockets.h"

namespace sirtaki::launch {

// Signals become bytes of a pipe, so that one poll waits for everything. Of a process there is one
// at a time; it stays until the process ends.
class SignalPipe {
 public:
  // SIGINT, SIGTERM, SIGCHLD, and SIGHUP unless it is ignored; SIGUSR1 and SIGUSR2 do nothing (the
  // programs have them too), and a closed pipe is no signal.
  static core::Status Open();
  static int fd();
  // The signals that have come since.
  static std::vector<int> Take();
};

// Lets this process have as many files open as the system allows. What it starts from then on has
// the limit as it was: select() in a program may not stand more.
void RaiseFileLimit();

struct Command {
  std::vector<std::string> words;
  std::vector<std::pair<std::string, std::string>> set;  // variables, over those of this process
  std::vector<std::string> unset;
  bool pipes = false;      // whether to read what it prints
  bool own_group = false;  // whether signals of the terminal, or to this group, pass it by
};

class Child {
 public:
  // Finds the program on PATH. It is killed when this process dies. kBackend: it cannot be started,
  // with errno in `*error`.
  core::Status Start(const Command& command, int* error);

  // How it has ended, once it has.
  std::optional<EndMessage> Ended();
  void Signal(int signal) const;  // nothing after it has ended
  bool running() const { return pid_ > 0; }
  const Descriptor& output() const { return output_; }
  const Descriptor& error() const { return error_; }
  void CloseOutput() { output_.Close(); }
  void CloseError() { error_.Close(); }

 private:
  pid_t pid_ = -1;
  Descriptor output_;
  Descriptor error_;
};

}  // namespace sirtaki::launch
