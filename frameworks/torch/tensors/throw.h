// The border between statuses, which the library returns inside, and exceptions, which its users
// see.
#pragma once

#include "core/base/status.h"

namespace sirtaki::detail {

// Throws sirtaki::Error. Precondition: status is not ok.
[[noreturn]] void ThrowStatus(const core::Status& status);

inline void ThrowIfError(const core::Status& status) {
  if (!status.ok()) ThrowStatus(status);
}

}  // namespace sirtaki::detail
