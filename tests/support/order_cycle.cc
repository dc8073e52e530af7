#include "tests/support/order_cycle.h"

#include <map>
#include <set>

namespace sirtaki::tests {

std::string CycleOf(const std::vector<std::vector<std::string>>& orders) {
  // Each piece of work is a node, with an edge to what comes next on a rank: taking away what has
  // no predecessor must take away everything.
  std::map<std::string, std::set<std::string>> after;
  std::map<std::string, int> before;
  for (const std::vector<std::string>& order : orders) {
    for (std::size_t i = 0; i < order.size(); ++i) {
      before.try_emplace(order[i], 0);
      if (i > 0 && after[order[i - 1]].insert(order[i]).second) ++before[order[i]];
    }
  }
  std::vector<std::string> free;
  for (const auto& [group, count] : before) {
    if (count == 0) free.push_back(group);
  }
  std::size_t taken = 0;
  while (!free.empty()) {
    const std::string group = free.back();
    free.pop_back();
    ++taken;
    for (const std::string& next : after[group]) {
      if (--before[next] == 0) free.push_back(next);
    }
  }
  if (taken == before.size()) return {};
  std::string text;
  for (const auto& [group, count] : before) {
    if (count > 0) text += "\n  " + group;
  }
  return "the ranks' orders have a cycle among:" + text;
}

}  // namespace sirtaki::tests
