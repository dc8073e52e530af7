#include "core/base/digest.h"

#include <array>
#include <bit>
#include <cstring>

namespace sirtaki::core {
namespace {

// Each step waits for the one before it, for about five cycles, and multiplies twice; this many
// independent ones keep the multiplier busy.
constexpr std::size_t kLanes = 4;
constexpr std::size_t kWord = sizeof(std::uint64_t);
// Odd, without a pattern: 2^64 divided by the golden ratio and by the square root of 2.
constexpr std::uint64_t kOfWord = 0x9e3779b97f4a7c15ull;
constexpr std::uint64_t kOfHash = 0xb504f333f9de6485ull;

// Reversible in each argument while the other stays, so that one changed word changes all that
// follows. A multiplication carries bits upward only, the rotation brings them down again; with one
// multiplication the highest bit of a word could be undone by a single bit of the next.
inline std::uint64_t Step(std::uint64_t hash, std::uint64_t word) {
  return std::rotl(hash + word * kOfWord, 31) * kOfHash;
}

inline std::uint64_t Load(const unsigned char* from) {
  std::uint64_t word = 0;
  std::memcpy(&word, from, kWord);
  return word;
}

// MurmurHash3's finalizer, reversible: spreads the last words over all bits.
std::uint64_t Spread(std::uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * 0xff51afd7ed558ccdull;
  hash = (hash ^ (hash >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return hash ^ (hash >> 33);
}

}  // namespace

std::uint64_t Digest(const void* data, std::size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  std::array<std::uint64_t, kLanes> lanes = {};
  for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = (i + 1) * kOfHash;
  std::size_t left = bytes;
  for (; left >= kLanes * kWord; left -= kLanes * kWord, at += kLanes * kWord) {
    for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = Step(lanes[i], Load(at + i * kWord));
  }
  std::uint64_t hash = Spread(bytes);
  for (const std::uint64_t lane : lanes) hash = Step(hash, lane);
  for (; left >= kWord; left -= kWord, at += kWord) hash = Step(hash, Load(at));
  if (left > 0) {
    std::uint64_t rest = 0;
    std::memcpy(&rest, at, left);
    hash = Step(hash, rest);
  }
  return Spread(hash);
}

}  // namespace sirtaki::core
