// The tree along which the ranks negotiate: the ranks of a host report to their leader (the host's
// lowest rank), leaders in rank order form a k-ary heap whose root is rank 0.
//
// Immutable; any thread may read it.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/rank_ranges.h"

namespace sirtaki::core {

class Tree {
 public:
  // `host_of_rank[r]` is any number that is equal for ranks of one host; a host's ranks need not be
  // neighbours. arity >= 1. Precondition: host_of_rank is not empty.
  Tree(const std::vector<int>& host_of_rank, int arity);

  struct Node {
    int parent = -1;                         // -1: the root
    std::vector<int> children;               // ascending
    std::vector<RankRanges> child_subtrees;  // parallel to children
    RankRanges subtree;                      // of this node, itself included
  };

  // A node is what rank `rank` has to know. Memory is that of its own neighbourhood. Precondition:
  // 0 <= rank < size().
  Node NodeOf(int rank) const;
  int size() const { return static_cast<int>(host_of_rank_.size()); }

 private:
  RankRanges SubtreeOf(int rank) const;
  RankRanges RanksOfHosts(std::int64_t first, std::int64_t last) const;
  std::vector<int> ChildrenOf(int rank) const;

  int arity_;
  // Hosts are numbered in the order of their leaders, so a host's number is its leader's place in
  // the heap.
  std::vector<int> host_of_rank_;
  std::vector<int> leaders_;               // by host number, ascending
  std::vector<RankRanges> ranks_of_host_;  // by host number
  // The end of a run, by host number, is the last host of the longest run from here in which each
  // host's ranks are neighbours and follow those of the host before. Such a run is one range,
  // however long.
  std::vector<int> run_end_;
};

}  // namespace sirtaki::core
