// What a case must give, by naive loops over the inputs of all members: nothing of the library's
// kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/conformance/case_table.h"
#include "tests/conformance/numbers.h"

namespace sirtaki::tests::conformance {

// One tensor of a case: of a grouped form one of several.
struct Exercise {
  std::vector<Array> inputs;                      // of each member
  std::vector<std::vector<std::int64_t>> splits;  // of each member; empty: none are given
  Array result;                                   // of the member `me`
  std::vector<std::int64_t> received_splits;      // the rows that came from each member, where told
  double tolerance = 0;                           // as WhyNotEqual's
};

// A number that tells a problem's elements from those of others.
std::uint64_t SeedOf(const Problem& problem);
// The index of the root among the members; of a collective without a root it is not used.
std::size_t RootOf(const Problem& problem, std::size_t members);

// `members`: the set's world ranks; `me`: this rank's index among them.
Exercise MakeExercise(const Problem& problem, int part, const std::vector<int>& members,
                      std::size_t me);

}  // namespace sirtaki::tests::conformance
