// Commands that are run for what they print.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/base/types.h"
#include "launch/base/child.h"
#include "launch/base/rank_messages.h"

namespace sirtaki::launch {

struct CommandOutcome {
  std::string why;       // it was not started; empty: it was
  bool in_time = false;  // it has ended by itself
  EndMessage end;        // then, how
  std::string output;    // at most 64 KiB
  std::string error;
  bool operator==(const CommandOutcome&) const = default;
};

// Runs them side by side, at most `at_once`, and gives their outcomes in the same order. One that
// takes longer than `patience` is killed, and what it has started. A signal that comes meanwhile
// kills all, and is given in `*signal` (0: none came); one that comes later ends this process.
std::vector<CommandOutcome> RunCommands(std::vector<Command> commands, core::Duration patience,
                                        std::size_t at_once, int* signal);

}  // namespace sirtaki::launch
