#include "core/base/rank_ranges.h"

#include <algorithm>

namespace sirtaki::core {
namespace {

// The rank behind the range has 64 bits, because the largest rank has no successor in an int.
std::int64_t After(const RankRange& range) { return std::int64_t{range.last} + 1; }

// The first range that ends at or after `rank`.
std::vector<RankRange>::const_iterator FirstEndingAt(const std::vector<RankRange>& ranges,
                                                     int rank) {
  return std::lower_bound(ranges.begin(), ranges.end(), rank,
                          [](const RankRange& range, int value) { return range.last < value; });
}

// Appends a range that begins no earlier than the last one of `ranges` does.
void Append(std::vector<RankRange>& ranges, RankRange range) {
  if (!ranges.empty() && After(ranges.back()) >= range.first) {
    ranges.back().last = std::max(ranges.back().last, range.last);
  } else {
    ranges.push_back(range);
  }
}

}  // namespace

RankRanges::RankRanges(std::initializer_list<int> ranks) {
  for (int rank : ranks) Add(rank);
}

RankRanges RankRanges::Single(int rank) { return Span(rank, rank); }

RankRanges RankRanges::Span(int first, int last) {
  RankRanges result;
  if (first <= last) result.ranges_.push_back({first, last});
  return result;
}

void RankRanges::Add(int rank) {
  // The common case: ranks come in ascending order.
  if (ranges_.empty() || rank >= ranges_.back().first) {
    Append(ranges_, {rank, rank});
    return;
  }
  const auto position = ranges_.begin() + (FirstEndingAt(ranges_, rank) - ranges_.cbegin());
  if (position->first <= rank) return;
  const bool joins_next = std::int64_t{rank} + 1 == position->first;
  const bool joins_previous = position != ranges_.begin() && After(position[-1]) == rank;
  if (joins_next && joins_previous) {
    position[-1].last = position->last;
    ranges_.erase(position);
  } else if (joins_next) {
    position->first = rank;
  } else if (joins_previous) {
    position[-1].last = rank;
  } else {
    ranges_.insert(position, {rank, rank});
  }
}

void RankRanges::Add(const RankRanges& other) {
  if (other.empty() || &other == this) return;
  if (ranges_.empty()) {
    ranges_ = other.ranges_;
    return;
  }
  if (other.ranges_.front().first >= ranges_.back().first) {
    for (const RankRange& range : other.ranges_) Append(ranges_, range);
    return;
  }
  if (other.ranges_.size() == 1 && other.ranges_[0].first == other.ranges_[0].last) {
    Add(other.ranges_[0].first);
    return;
  }
  std::vector<RankRange> merged;
  merged.reserve(ranges_.size() + other.ranges_.size());
  auto mine = ranges_.begin();
  auto theirs = other.ranges_.begin();
  while (mine != ranges_.end() || theirs != other.ranges_.end()) {
    const bool take_mine =
        theirs == other.ranges_.end() || (mine != ranges_.end() && mine->first <= theirs->first);
    Append(merged, take_mine ? *mine++ : *theirs++);
  }
  ranges_ = std::move(merged);
}

void RankRanges::Remove(const RankRanges& other) {
  if (!Intersects(other)) return;
  std::vector<RankRange> kept;
  kept.reserve(ranges_.size() + other.ranges_.size());
  auto theirs = other.ranges_.begin();
  for (const RankRange& range : ranges_) {
    while (theirs != other.ranges_.end() && theirs->last < range.first) ++theirs;
    std::int64_t next = range.first;  // the first rank of `range` that is not dealt with
    // The loop leaves `theirs` where it is, since its range may reach into our next one.
    for (auto cut = theirs; cut != other.ranges_.end() && cut->first <= range.last; ++cut) {
      if (cut->first > next) kept.push_back({static_cast<int>(next), cut->first - 1});
      next = After(*cut);
    }
    if (next <= range.last) kept.push_back({static_cast<int>(next), range.last});
  }
  ranges_ = std::move(kept);
}

std::int64_t RankRanges::Count() const {
  std::int64_t count = 0;
  for (const RankRange& range : ranges_) count += After(range) - range.first;
  return count;
}

bool RankRanges::Contains(int rank) const {
  const auto range = FirstEndingAt(ranges_, rank);
  return range != ranges_.end() && range->first <= rank;
}

bool RankRanges::ContainsAll(const RankRanges& other) const {
  // Ranges are not adjacent, so a range of theirs lies in one of ours or is not all ours.
  auto mine = ranges_.begin();
  for (const RankRange& range : other.ranges_) {
    while (mine != ranges_.end() && mine->last < range.first) ++mine;
    if (mine == ranges_.end() || mine->first > range.first || mine->last < range.last) return false;
  }
  return true;
}

bool RankRanges::Intersects(const RankRanges& other) const {
  auto mine = ranges_.begin();
  auto theirs = other.ranges_.begin();
  while (mine != ranges_.end() && theirs != other.ranges_.end()) {
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
  auto mine = ranges_.begin();
  auto theirs = other.ranges_.begin();
  while (mine != ranges_.end() && theirs != other.ranges_.end()) {
    const int first = std::max(mine->first, theirs->first);
    const int last = std::min(mine->last, theirs->last);
    if (first <= last) Append(result.ranges_, {first, last});
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
  for (const RankRange& range : ranges_) {
    if (rank < range.first) return -1;
    if (rank <= range.last) return before + (std::int64_t{rank} - range.first);
    before += After(range) - range.first;
  }
  return -1;
}

std::vector<int> RankRanges::ToVector() const {
  std::vector<int> ranks;
  ranks.reserve(static_cast<std::size_t>(Count()));
  for (const RankRange& range : ranges_) {
    for (std::int64_t rank = range.first; rank <= range.last; ++rank) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return ranks;
}

std::string RankRanges::ToString() const {
  if (ranges_.empty()) return "none";
  std::string text;
  for (const RankRange& range : ranges_) {
    if (!text.empty()) text += ", ";
    text += std::to_string(range.first);
    if (range.last != range.first) text += "-" + std::to_string(range.last);
  }
  return text;
}

}  // namespace sirtaki::core
