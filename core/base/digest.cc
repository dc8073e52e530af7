#include "core/base/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace sirtaki::core {
namespace {

XXH3_state_t* StateOf(const std::shared_ptr<void>& state) {
  return static_cast<XXH3_state_t*>(state.get());
}

}  // namespace

std::uint64_t Digest(const void* data, std::size_t bytes) { return XXH3_64bits(data, bytes); }

RunningDigest::RunningDigest() : state_(XXH3_createState(), XXH3_freeState) {
  XXH3_64bits_reset(StateOf(state_));
}

void RunningDigest::Add(const void* data, std::size_t bytes) {
  XXH3_64bits_update(StateOf(state_), data, bytes);
}

std::uint64_t RunningDigest::Get() const { return XXH3_64bits_digest(StateOf(state_)); }

}  // namespace sirtaki::core
