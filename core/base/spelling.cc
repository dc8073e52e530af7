#include "core/base/spelling.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace sirtaki::core {
namespace {

// How many insertions, deletions and replacements of a character lead from one to the other.
std::size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string NearestWord(std::string_view given, const std::vector<std::string>& known,
                        std::size_t prefix) {
  std::string nearest;
  std::size_t best = std::numeric_limits<std::size_t>::max();
  for (const std::string& word : known) {
    const std::size_t distance = EditDistance(given, word);
    if (distance >= best) continue;
    best = distance;
    nearest = word;
  }
  // What is further away was not meant.
  const std::size_t counted = given.size() - std::min(prefix, given.size());
  return best <= std::max<std::size_t>(2, counted / 3) ? nearest : std::string();
}

std::string NearestText(std::string_view given, const std::vector<std::string>& known,
                        std::size_t prefix) {
  const std::string nearest = NearestWord(given, known, prefix);
  return nearest.empty() ? std::string() : "; the nearest known is " + nearest;
}

}  // namespace sirtaki::core
