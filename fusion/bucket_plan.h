// Gradients, in the order in which they become ready -> buckets that are reduced together. Pure:
// the same on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/protocol/request.h"

namespace sirtaki::fusion {

struct BucketSizes {
  std::int64_t first = 0;  // of the bucket that is complete first
  std::int64_t others = 0;
};

// Indices into `gradients`, each once, ascending in a bucket; a bucket holds one type on one
// device. Buckets come in the order in which they are complete. None is split: a bucket is above
// its size by the last of its gradients, or because that found it less than half full.
std::vector<std::vector<std::size_t>> PlanBuckets(const std::vector<core::Signature>& gradients,
                                                  const BucketSizes& sizes);

}  // namespace sirtaki::fusion
