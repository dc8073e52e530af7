// A process that this one starts.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "launch/base/rank_messages.h"
#include "launch/base/sockets.h"

namespace sirtaki::launch {

// Lets this process have as many files open as the system allows. What it starts from then on has
// the limit as it was: select() in a program may not stand more. Returns how many.
std::size_t RaiseFileLimit();

// Of this process; empty if it is gone.
std::string CurrentFolder();

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
  void Signal(int signal) const;       // nothing after it has ended
  void SignalGroup(int signal) const;  // to the group that it leads: what it has started too
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
