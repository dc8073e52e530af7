#include "core/status.h"

namespace sirtaki::core {

std::string_view StatusCodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid argument";
    case StatusCode::kMismatch:
      return "mismatch";
    case StatusCode::kNotInitialized:
      return "not initialized";
    case StatusCode::kDuplicateName:
      return "duplicate name";
    case StatusCode::kShutDown:
      return "shut down";
    case StatusCode::kPeerLost:
      return "peer lost";
    case StatusCode::kTimedOut:
      return "timed out";
    case StatusCode::kAborted:
      return "aborted";
    case StatusCode::kBackend:
      return "backend failure";
    case StatusCode::kProtocol:
      return "protocol error";
    case StatusCode::kUnsupported:
      return "unsupported";
  }
  return "unknown error";
}

std::string Status::ToString() const {
  std::string text(StatusCodeName(code_));
  if (ok()) return text;
  if (!message_.empty()) text += ": " + message_;

  std::string from;
  if (origin_.rank >= 0) from = "rank " + std::to_string(origin_.rank);
  if (!origin_.host.empty()) from += (from.empty() ? "host " : " on host ") + origin_.host;
  if (!from.empty()) from.insert(0, "from ");
  // Most messages name the tensor themselves; twice would read badly.
  if (!origin_.tensor.empty() && message_.find(origin_.tensor) == std::string::npos) {
    from += (from.empty() ? "tensor " : ", tensor ") + origin_.tensor;
  }
  if (!from.empty()) text += " (" + from + ")";
  return text;
}

}  // namespace sirtaki::core
