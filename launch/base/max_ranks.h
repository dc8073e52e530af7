// How many ranks a job may have, by its options and by the messages of its ranks.
#pragma once

namespace sirtaki::launch {

inline constexpr int kMaxRanks = 1 << 20;

}  // namespace sirtaki::launch
