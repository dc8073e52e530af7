// The invariant behind overlapping process sets: that no two ranks start the same work in orders
// that contradict each other, over however many ranks.
#pragma once

#include <string>
#include <vector>

namespace sirtaki::tests {

// Whether the union of the ranks' orders has a cycle: what is in it, or nothing.
std::string CycleOf(const std::vector<std::vector<std::string>>& orders);

}  // namespace sirtaki::tests
