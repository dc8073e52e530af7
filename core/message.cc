#include "core/message.h"

namespace sirtaki::core {

Status Cause::ToStatus() const {
  // A fault is never ok, whatever its code says: a caller would go on with undefined tensors.
  return {code == StatusCode::kOk ? StatusCode::kAborted : code, text, Origin{rank, host, key}};
}

}  // namespace sirtaki::core
