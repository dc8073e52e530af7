// A set of ranks kept as sorted, disjoint, non-adjacent closed ranges: [0,2] [5,5].
// Small whatever the world's size as long as the ranks are neighbours, which they are in trees by
// host.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace sirtaki::core {

struct RankRange {
  int first = 0;
  int last = 0;  // inclusive
  bool operator==(const RankRange&) const = default;
};

class RankRanges {
 public:
  RankRanges() = default;
  RankRanges(std::initializer_list<int> ranks);
  static RankRanges Single(int rank);
  static RankRanges Span(int first, int last);  // empty if last < first

  void Add(int rank);
  void Add(const RankRanges& other) {
    if (!other.empty()) AddSome(other);
  }
  void Remove(const RankRanges& other);
  void Clear() { *this = RankRanges(); }

  bool empty() const { return several_.empty() && one_.last < one_.first; }
  std::int64_t Count() const;
  bool Contains(int rank) const;
  bool ContainsAll(const RankRanges& other) const;
  bool Intersects(const RankRanges& other) const;
  RankRanges Intersection(const RankRanges& other) const;
  int First() const { return ranges().front().first; }  // precondition: not empty
  // The position of `rank` among the members, ascending; -1 if it is none.
  std::int64_t IndexOf(int rank) const;
  std::vector<int> ToVector() const;

  std::span<const RankRange> ranges() const {
    if (!several_.empty()) return several_;
    return {&one_, empty() ? 0U : 1U};
  }
  // "0-2, 5"; "none" when empty.
  std::string ToString() const;

  bool operator==(const RankRanges&) const = default;

 private:
  void AddSome(const RankRanges& other);  // precondition: `other` is not empty
  // Adds a range that begins no earlier than the last one does.
  void Append(RankRange range);

  // Most sets are one range or none, which takes no allocation.
  RankRange one_ = {0, -1};         // {0, -1}: there is none, or there are several
  std::vector<RankRange> several_;  // empty unless there are
};

// The members of a process set, which do not change and are shared by all that deals with the set.
using MembersPtr = std::shared_ptr<const RankRanges>;

}  // namespace sirtaki::core
