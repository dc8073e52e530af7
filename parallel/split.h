// A dimension of a tensor is divided among the ranks of a set. Pure: the same on every rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace sirtaki::parallel {

// A split has `size` elements in `blocks` equal blocks, one after the other: q, k and v of an
// attention, for instance. Each block is cut into a part for each rank, of whole units; where they do
// not divide, the first ranks get a unit more.
struct Split {
  std::int64_t size = 0;
  std::int64_t blocks = 1;
  std::int64_t unit = 1;
  int ranks = 1;
};

struct SplitRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

// Fails with kInvalidArgument if a number is not positive, blocks and units do not make up the
// size, or there is not a unit for every rank. `what`: what the elements are, for the text.
core::Status CheckSplit(const Split& split, const std::string& what);

// The elements of the rank with this index: a range in each block. Precondition: CheckSplit is ok.
std::vector<SplitRange> RangesOf(const Split& split, int index);

// How many those are.
std::int64_t PartSize(const Split& split, int index);

}  // namespace sirtaki::parallel
