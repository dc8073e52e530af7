// Seeds that depend on two numbers.
#pragma once

#include <cstdint>

namespace sirtaki::detail {

// The step and the finaliser of splitmix64: every bit of the input reaches every bit of the result,
// and no two inputs have the same one.
inline std::uint64_t SplitMix64(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15U;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31);
}

// Returns the seed of rank `rank` of a job. LibTorch's generator for the CPU uses the low 32 bits
// of a seed only, so these differ between any two ranks: each step on them is a bijection.
inline std::uint64_t SeedOfRank(std::uint64_t seed, int rank) {
  const std::uint64_t mixed = SplitMix64(seed);
  // The finaliser of MurmurHash3 for 32 bits.
  std::uint32_t low = static_cast<std::uint32_t>(mixed) + static_cast<std::uint32_t>(rank);
  low = (low ^ (low >> 16)) * 0x85ebca6bU;
  low = (low ^ (low >> 13)) * 0xc2b2ae35U;
  low ^= low >> 16;
  const std::uint64_t high = SplitMix64(mixed + static_cast<std::uint64_t>(rank)) >> 32;
  return (high << 32) | low;
}

}  // namespace sirtaki::detail
