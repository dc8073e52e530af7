// Which parts of an address space are free. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace sirtaki::ops::shm {

class AddressRanges {
 public:
  explicit AddressRanges(std::int64_t bytes) { Give(0, bytes); }

  // The smallest free range that fits, the lowest of those; -1 if there is none.
  std::int64_t Take(std::int64_t bytes);
  // Precondition: taken, all of it.
  void Give(std::int64_t offset, std::int64_t bytes);

  std::size_t count() const { return by_offset_.size(); }

 private:
  void Insert(std::int64_t offset, std::int64_t bytes);
  void Erase(std::map<std::int64_t, std::int64_t>::iterator range);

  std::map<std::int64_t, std::int64_t> by_offset_;           // to bytes; never adjacent
  std::set<std::pair<std::int64_t, std::int64_t>> by_size_;  // bytes, offset: the same ranges
};

}  // namespace sirtaki::ops::shm
