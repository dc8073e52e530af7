// The border between statuses, which the library returns inside, and exceptions, which its users
// see.
#pragma once

#include "core/base/status.h"
#include "sirtaki/error.h"

namespace sirtaki::detail {

// Another rank's program has thrown, and so gives nothing to what both take part in.
class RefusedError : public Error {
  using Error::Error;
};

// Throws sirtaki::Error, a RefusedError for kRefused. Precondition: status is not ok.
[[noreturn]] void ThrowStatus(const core::Status& status);

inline void ThrowIfError(const core::Status& status) {
  if (!status.ok()) ThrowStatus(status);
}

}  // namespace sirtaki::detail
