#include "sirtaki/random.h"

#include <ATen/Context.h>

#include <string>

#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/tensors/seed_mix.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {

std::uint64_t seed_all(std::uint64_t seed, SeedMode mode) {
  const auto state = detail::CurrentSession();
  detail::ThrowIfError(state->Check());
  const bool equal = mode == SeedMode::EqualOnAllRanks;
  detail::AgreeOnList(
      "seed_all",
      {"seed " + std::to_string(seed) + (equal ? ", equal on all ranks" : ", different per rank")},
      "", state);
  if (!equal) seed = detail::SeedOfRank(seed, state->topology().rank);
  at::manual_seed(seed);
  return seed;
}

}  // namespace sirtaki
