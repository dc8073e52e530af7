// The border between statuses, which the library returns inside, and exceptions, which its users
// see.
#pragma once

#include <string>
#include <utility>

#include "core/base/status.h"
#include "sirtaki/error.h"

namespace sirtaki::detail {

// Another rank's program has thrown, and so gives nothing to what both take part in.
class RefusedError : public Error {
  using Error::Error;
};

// Throws sirtaki::Error, a RefusedError for kRefused. Precondition: status is not ok.
[[noreturn]] void ThrowStatus(const core::Status& status);

// Throws InvalidArgument.
[[noreturn]] inline void ThrowInvalid(std::string text, core::Origin origin = {}) {
  ThrowStatus(core::Status(core::StatusCode::kInvalidArgument, std::move(text), std::move(origin)));
}

inline void ThrowIfError(const core::Status& status) {
  if (!status.ok()) ThrowStatus(status);
}

}  // namespace sirtaki::detail
