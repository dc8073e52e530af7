#include "core/protocol/message.h"

namespace sirtaki::core {

Status Cause::ToStatus() const {
  // A fault is never ok, whatever its code says: a caller would go on with undefined tensors.
  return {code == StatusCode::kOk ? StatusCode::kAborted : code, text, Origin{rank, host, key}};
}

std::string TensorName(const Key& key) {
  if (key.is_join()) return {};
  Key of_world = key;
  of_world.set = kWorldSet;
  const std::string text = of_world.ToString();
  return text.starts_with('"') ? key.name.text() : text;
}

}  // namespace sirtaki::core
