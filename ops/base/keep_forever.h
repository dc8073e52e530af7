// What an operation that never returned, or failed, may still touch is kept: reachable on purpose, and
// freed when that is over, or never.
#pragma once

#include <functional>
#include <memory>

namespace sirtaki::ops {

// Thread-safe.
void KeepForever(std::shared_ptr<void> what);

// A question that may be asked on any thread and at any time: whether the memory of an operation that
// has failed, and whose Completion is gone, is touched no more. Null: that cannot be known.
using LetGo = std::function<bool()>;
LetGo LetsGoAtOnce();

// Keeps it until `let_go` says yes: that is asked now, whenever something else is kept, and by
// DropKept. Thread-safe.
void KeepUntil(LetGo let_go, std::shared_ptr<void> what);
void DropKept();

}  // namespace sirtaki::ops
