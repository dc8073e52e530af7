// Ranks that ask for different things under one name, or for what cannot be: every collective and
// every attribute.
#pragma once

#include "sirtaki/torch.h"
#include "tests/conformance/case_table.h"

namespace sirtaki::tests::conformance {

// Rank `odd` differs from the others in one attribute after the other. Every rank must get the
// mismatch, with what each group of ranks asked for; then the same name works. The name has been
// used before, so that the ranks have agreed on an id for it. Collective over the world of at least
// two ranks.
void RunMismatches(Collective collective, int odd);

// Three groups of ranks and more: each is told. Collective over at least three ranks.
void RunThreeWayMismatch();

// Rank `odd` alone has an argument that is wrong whatever the others do: all ranks get an
// InvalidArgument that names it; then the same name works. Collective over the world.
void RunWrongArguments(int odd);

// A call on a set that this rank is not in, or that was removed, throws at once. Collective over at
// least two ranks.
void RunWrongSets();

}  // namespace sirtaki::tests::conformance
