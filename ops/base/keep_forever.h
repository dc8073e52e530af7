// KeepForever keeps what an operation that never returned, or failed, may still touch: reachable on
// purpose, freed never.
#pragma once

#include <memory>

namespace sirtaki::ops {

// Thread-safe.
void KeepForever(std::shared_ptr<void> what);

}  // namespace sirtaki::ops
