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
static_assert(Same(ErrorCode::InvalidArgument, core::StatusCode::kInvalidArgument) &&
              Same(ErrorCode::Mismatch, core::StatusCode::kMismatch) &&
              Same(ErrorCode::NotInitialized, core::StatusCode::kNotInitialized) &&
              Same(ErrorCode::DuplicateName, core::StatusCode::kDuplicateName) &&
              Same(ErrorCode::ShutDown, core::StatusCode::kShutDown) &&
              Same(ErrorCode::PeerLost, core::StatusCode::kPeerLost) &&
              Same(ErrorCode::TimedOut, core::StatusCode::kTimedOut) &&
              Same(ErrorCode::Aborted, core::StatusCode::kAborted) &&
              Same(ErrorCode::Backend, core::StatusCode::kBackend) &&
              Same(ErrorCode::Protocol, core::StatusCode::kProtocol) &&
              Same(ErrorCode::Unsupported, core::StatusCode::kUnsupported));

}  // namespace

Error::Error(ErrorCode code, const std::string& message, ErrorOrigin origin)
    : std::runtime_error(message),
      code_(code),
      origin_(std::make_shared<const ErrorOrigin>(std::move(origin))) {}

Error::Error(const Error&) noexcept = default;
Error& Error::operator=(const Error&) noexcept = default;
Error::~Error() = default;

const char* error_code_name(ErrorCode code) noexcept {
  if (code == ErrorCode::Backend) return "backend";  // not "backend failure"
  if (code == ErrorCode::Protocol) return "protocol";
  return core::StatusCodeName(static_cast<core::StatusCode>(code)).data();  // of a literal
}

#define SIRTAKI_TEXT(x) #x
#define SIRTAKI_VERSION_TEXT(a, b, c) SIRTAKI_TEXT(a) "." SIRTAKI_TEXT(b) "." SIRTAKI_TEXT(c)

const char* version() noexcept {
  return SIRTAKI_VERSION_TEXT(SIRTAKI_VERSION_MAJOR, SIRTAKI_VERSION_MINOR, SIRTAKI_VERSION_PATCH);
}

namespace detail {

void ThrowStatus(const core::Status& status) {
  // The process's own session does not say it again at its end; other sessions return it.
  if (const auto own = session::DefaultSession()) own->NoteSeen(status);
  const core::Origin& from = status.origin();
  ErrorOrigin origin{from.rank, from.host, from.tensor};
  if (status.code() == core::StatusCode::kRefused) {
    throw RefusedError(ErrorCode::InvalidArgument, status.ToString(), std::move(origin));
  }
  throw Error(static_cast<ErrorCode>(status.code()), status.ToString(), std::move(origin));
}

}  // namespace detail
}  // namespace sirtaki
