// seed_all() seeds the random generators of all ranks.
#pragma once

#include <cstdint>

#include "sirtaki/export.h"

namespace sirtaki {

enum class SeedMode : unsigned char {
  DifferentPerRank,  // dropout and augmentation differ between the ranks
  EqualOnAllRanks,   // every rank draws the same numbers
};

// Seeds LibTorch's generators, as torch::manual_seed does: the default one of the CPU and those of
// all devices. Collective: every rank gives the same seed and mode; if they differ, all throw
// Mismatch. Returns the seed that this rank uses:
//
//   EqualOnAllRanks   `seed` itself, so that one process with torch::manual_seed draws the same;
//   DifferentPerRank  one derived from `seed` and the rank. Two ranks of a job never get the same,
//                     and jobs with neighbouring seeds share none, as those with seed + rank would.
SIRTAKI_API std::uint64_t seed_all(std::uint64_t seed, SeedMode mode = SeedMode::DifferentPerRank);

}  // namespace sirtaki
