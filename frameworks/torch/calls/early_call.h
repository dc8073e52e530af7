// An early call is one that a program of an elastic job makes before elastic::run(), and that other ranks
// take part in: a worker that comes later would make it alone, while the others train.
#pragma once

#include <string>

#include "frameworks/torch/session/session_state.h"

namespace sirtaki::detail {

// Says whether a call of the program would be early now. Calls of init() itself are not: all ranks make
// them in each generation.
bool IsEarlyCall(const SessionState& session);
// Throws InvalidArgument. `what`: the call, for the text.
[[noreturn]] void RefuseEarlyCall(const std::string& what);

}  // namespace sirtaki::detail
