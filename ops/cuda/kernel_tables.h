// What the host tells our kernels, by value: it fits a kernel's parameters, so that no memory has
// to be kept until the device has read it. For nvcc and the host's compiler alike.
#pragma once

namespace sirtaki::ops::cuda {

inline constexpr int kThreadsOfABlock = 256;
inline constexpr long long kTile = 4096;  // elements that a block copies

// Elements from here to there. The memories are disjoint, or the same.
struct CopySegment {
  const void* from = nullptr;  // null: the identity
  void* to = nullptr;
  long long count = 0;
};

struct CopyTable {
  static constexpr int kMost = 112;

  CopySegment segments[kMost];
  unsigned first_tiles[kMost + 1];  // of each segment, one tile a block; the last is the end
  int count;                        // of segments
  double factor;                    // as fusion::Scale
  long long divisor;
  alignas(8) unsigned char identity[16];  // an element of the type that is written
};
static_assert(sizeof(CopyTable) <= 4096, "what a kernel's parameters may be on every GPU");

// Vectors that follow each other, combined element by element in their order.
struct ReduceTable {
  const void* parts;
  void* result;  // may be the first of them
  long long count;
  int members;
};

}  // namespace sirtaki::ops::cuda
