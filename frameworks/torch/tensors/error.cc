#include "sirtaki/error.h"

#include <utility>

#include "core/base/status.h"
#include "frameworks/torch/tensors/throw.h"
#include "session/session.h"
#include "sirtaki/version.h"

namespace sirtaki {
namespace {

constexpr bool Same(ErrorCode code, core::StatusCode status) {
  return static_cast<unsigned char>(code) == static_cast<unsigned char>(status);
}
static_assert(Same(ErrorCode::invalid_argument, core::StatusCode::kInvalidArgument) &&
              Same(ErrorCode::mismatch, core::StatusCode::kMismatch) &&
              Same(ErrorCode::not_initialized, core::StatusCode::kNotInitialized) &&
              Same(ErrorCode::duplicate_name, core::StatusCode::kDuplicateName) &&
              Same(ErrorCode::shut_down, core::StatusCode::kShutDown) &&
              Same(ErrorCode::peer_lost, core::StatusCode::kPeerLost) &&
              Same(ErrorCode::timed_out, core::StatusCode::kTimedOut) &&
              Same(ErrorCode::aborted, core::StatusCode::kAborted) &&
              Same(ErrorCode::backend, core::StatusCode::kBackend) &&
              Same(ErrorCode::protocol, core::StatusCode::kProtocol) &&
              Same(ErrorCode::unsupported, core::StatusCode::kUnsupported));

}  // namespace

Error::Error(ErrorCode code, const std::string& message, ErrorOrigin origin)
    : std::runtime_error(message),
      code_(code),
      origin_(std::make_shared<const ErrorOrigin>(std::move(origin))) {}

Error::Error(const Error&) noexcept = default;
Error& Error::operator=(const Error&) noexcept = default;
Error::~Error() = default;

const char* error_code_name(ErrorCode code) noexcept {
  if (code == ErrorCode::backend) return "backend";  // not "backend failure"
  if (code == ErrorCode::protocol) return "protocol";
  return core::StatusCodeName(static_cast<core::StatusCode>(code)).data();  // of a literal
}

#define SIRTAKI_TEXT(x) #x
#define SIRTAKI_VERSION_TEXT(a, b, c) SIRTAKI_TEXT(a) "." SIRTAKI_TEXT(b) "." SIRTAKI_TEXT(c)

const char* version() noexcept {
  return SIRTAKI_VERSION_TEXT(SIRTAKI_VERSION_MAJOR, SIRTAKI_VERSION_MINOR, SIRTAKI_VERSION_PATCH);
}

namespace detail {

void ThrowStatus(const core::Status& status) {
  // Not said again at the end of the process's own session; of others the end is returned.
  if (const auto own = session::DefaultSession()) own->NoteSeen(status);
  const core::Origin& from = status.origin();
  throw Error(static_cast<ErrorCode>(status.code()), status.ToString(),
              ErrorOrigin{from.rank, from.host, from.tensor});
}

}  // namespace detail
}  // namespace sirtaki
