// Commands that are run for what they print.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
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

// RunAgain is asked when the command of this number has ended by itself. It gives the time after which
// the command is run again, and may change its words; none: the outcome stays.
using RunAgain =
    std::function<std::optional<core::Duration>(std::size_t, const CommandOutcome&, Command*)>;

// Runs them side by side, at most `at_once`, and gives their outcomes in the same order. One that
// takes longer than `patience` is killed, and what it has started. A signal that comes meanwhile
// kills all, and is given in `*signal` (0: none came); one that comes later ends this process.
std::vector<CommandOutcome> RunCommands(std::vector<Command> commands, core::Duration patience,
                                        std::size_t at_once, int* signal,
                                        const RunAgain& again = {});

}  // namespace sirtaki::launch
