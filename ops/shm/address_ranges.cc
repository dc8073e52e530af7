#include "ops/shm/address_ranges.h"

#include <iterator>

namespace sirtaki::ops::shm {

std::int64_t AddressRanges::Take(std::int64_t bytes) {
  const auto fits = by_size_.lower_bound({bytes, 0});
  if (fits == by_size_.end()) return -1;
  const auto [size, offset] = *fits;
  Erase(by_offset_.find(offset));
  if (size > bytes) Insert(offset + bytes, size - bytes);
  return offset;
}

void AddressRanges::Give(std::int64_t offset, std::int64_t bytes) {
  const auto after = by_offset_.lower_bound(offset);
  if (after != by_offset_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      Erase(before);
    }
  }
  if (after != by_offset_.end() && after->first == offset + bytes) {
    bytes += after->second;
    Erase(after);
  }
  Insert(offset, bytes);
}

void AddressRanges::Insert(std::int64_t offset, std::int64_t bytes) {
  by_offset_.emplace(offset, bytes);
  by_size_.emplace(bytes, offset);
}

void AddressRanges::Erase(std::map<std::int64_t, std::int64_t>::iterator range) {
  by_size_.erase({range->second, range->first});
  by_offset_.erase(range);
}

}  // namespace sirtaki::ops::shm
