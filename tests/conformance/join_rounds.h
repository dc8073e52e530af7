// Ranks with different numbers of batches: each runs its own, then joins.
#pragma once

#include "sirtaki/torch.h"

namespace sirtaki::tests::conformance {

// `rounds` times: uneven batches of named and unnamed operations on the process set, each result
// compared with what the ranks that have not joined give, then join. Collective over the set's
// members; the others must not call it.
void RunJoinRounds(const ProcessSet& process_set, int rounds);

}  // namespace sirtaki::tests::conformance
