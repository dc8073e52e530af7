#include "core/base/rank_ranges.h"

#include <algorithm>
#include <utility>

namespace sirtaki::core {
namespace {

// The rank behind the range has 64 bits, because the largest rank has no successor in an int.
std::int64_t After(const RankRange& range) { return std::int64_t{range.last} + 1; }

// The first range that ends at or after `rank`.
std::span<const RankRange>::iterator FirstEndingAt(std::span<const RankRange> ranges, int rank) {
  return std::lower_bound(ranges.begin(), ranges.end(), rank,
                          [](const RankRange& range, int value) { return range.last < value; });
}

}  // namespace

RankRanges::RankRanges(std::initializer_list<int> ranks) {
  for (int rank : ranks) Add(rank);
}

RankRanges RankRanges::Single(int rank) { return Span(rank, rank); }

RankRanges RankRanges::Span(int first, int last) {
  RankRanges result;
  if (first <= last) result.one_ = {first, last};
  return result;
}

void RankRanges::Append(RankRange range) {
  if (empty()) {
    one_ = range;
    return;
  }
  RankRange& back = several_.empty() ? one_ : several_.back();
  if (After(back) >= range.first) {
    back.last = std::max(back.last, range.last);
    return;
  }
  if (several_.empty()) several_.push_back(std::exchange(one_, {0, -1}));
  several_.push_back(range);
}

void RankRanges::Add(int rank) { Add(Single(rank)); }

void RankRanges::AddSome(const RankRanges& other) {
  if (empty() || &other == this) {
    *this = other;
    return;
  }
  // Most often two ranges that touch become one.
  if (several_.empty() && other.several_.empty() && After(one_) >= other.one_.first &&
      After(other.one_) >= one_.first) {
    one_ = {std::min(one_.first, other.one_.first), std::max(one_.last, other.one_.last)};
    return;
  }
  const std::span<const RankRange> theirs = other.ranges();
  // The common case of several: ranks come in ascending order.
  if (theirs.front().first >= ranges().back().first) {
    for (const RankRange& range : theirs) Append(range);
    return;
  }
  if (theirs.size() == 1 && ContainsAll(other)) return;
  RankRanges merged;
  const std::span<const RankRange> mine = ranges();
  auto next = mine.begin();
  for (const RankRange& range : theirs) {
    while (next != mine.end() && next->first <= range.first) merged.Append(*next++);
    merged.Append(range);
  }
  while (next != mine.end()) merged.Append(*next++);
  *this = std::move(merged);
}

void RankRanges::Remove(const RankRanges& other) {
  if (!Intersects(other)) return;
  RankRanges kept;
  const std::span<const RankRange> cuts = other.ranges();
  auto theirs = cuts.begin();
  for (const RankRange& range : ranges()) {
    while (theirs != cuts.end() && theirs->last < range.first) ++theirs;
    std::int64_t next = range.first;  // the first rank of `range` that is not dealt with
    // The loop leaves `theirs` where it is, since its range may reach into our next one.
    for (auto cut = theirs; cut != cuts.end() && cut->first <= range.last; ++cut) {
      if (cut->first > next) kept.Append({static_cast<int>(next), cut->first - 1});
      next = After(*cut);
    }
    if (next <= range.last) kept.Append({static_cast<int>(next), range.last});
  }
  *this = std::move(kept);
}

std::int64_t RankRanges::Count() const {
  std::int64_t count = 0;
  for (const RankRange& range : ranges()) count += After(range) - range.first;
  return count;
}

bool RankRanges::Contains(int rank) const {
  const std::span<const RankRange> all = ranges();
  const auto range = FirstEndingAt(all, rank);
  return range != all.end() && range->first <= rank;
}

bool RankRanges::ContainsAll(const RankRanges& other) const {
  // Ranges are not adjacent, so a range of theirs lies in one of ours or is not all ours.
  const std::span<const RankRange> all = ranges();
  auto mine = all.begin();
  for (const RankRange& range : other.ranges()) {
    while (mine != all.end() && mine->last < range.first) ++mine;
    if (mine == all.end() || mine->first > range.first || mine->last < range.last) return false;
  }
  return true;
}

bool RankRanges::Intersects(const RankRanges& other) const {
  const std::span<const RankRange> ours = ranges();
  const std::span<const RankRange> others = other.ranges();
  auto mine = ours.begin();
  auto theirs = others.begin();
  while (mine != ours.end() && theirs != others.end()) {
    if (mine->last < theirs->first) {
      ++mine;
    } else if (theirs->last < mine->first) {
      ++theirs;
    } else {
      return true;
    }
  }
  return false;
}

RankRanges RankRanges::Intersection(const RankRanges& other) const {
  RankRanges result;
  const std::span<const RankRange> ours = ranges();
  const std::span<const RankRange> others = other.ranges();
  auto mine = ours.begin();
  auto theirs = others.begin();
  while (mine != ours.end() && theirs != others.end()) {
    const int first = std::max(mine->first, theirs->first);
    const int last = std::min(mine->last, theirs->last);
    if (first <= last) result.Append({first, last});
    if (mine->last < theirs->last) {
      ++mine;
    } else {
      ++theirs;
    }
  }
  return result;
}

std::int64_t RankRanges::IndexOf(int rank) const {
  std::int64_t before = 0;
  for (const RankRange& range : ranges()) {
    if (rank < range.first) return -1;
    if (rank <= range.last) return before + (std::int64_t{rank} - range.first);
    before += After(range) - range.first;
  }
  return -1;
}

std::vector<int> RankRanges::ToVector() const {
  std::vector<int> ranks;
  ranks.reserve(static_cast<std::size_t>(Count()));
  for (const RankRange& range : ranges()) {
    for (std::int64_t rank = range.first; rank <= range.last; ++rank) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return ranks;
}

std::string RankRanges::ToString() const {
  if (empty()) return "none";
  std::string text;
  for (const RankRange& range : ranges()) {
    if (!text.empty()) text += ", ";
    text += std::to_string(range.first);
    if (range.last != range.first) text += "-" + std::to_string(range.last);
  }
  return text;
}

}  // namespace sirtaki::core
