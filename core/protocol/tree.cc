#include "core/protocol/tree.h"

#include <algorithm>
#include <cstdint>
#include <unordered_map>

#include "core/base/check.h"

namespace sirtaki::core {

Tree::Tree(const std::vector<int>& host_of_rank, int arity) : arity_(arity) {
  SIRTAKI_CHECK(!host_of_rank.empty(), "a tree has at least one rank");
  SIRTAKI_CHECK(arity >= 1, "a tree's arity is at least 1");
  const int size = static_cast<int>(host_of_rank.size());
  host_of_rank_.reserve(host_of_rank.size());
  std::unordered_map<int, int> number_of_host;
  for (int rank = 0; rank < size; ++rank) {
    const int next = static_cast<int>(leaders_.size());
    const auto [place, is_new] =
        number_of_host.try_emplace(host_of_rank[static_cast<std::size_t>(rank)], next);
    if (is_new) {
      leaders_.push_back(rank);
      ranks_of_host_.emplace_back();
    }
    host_of_rank_.push_back(place->second);
    ranks_of_host_[static_cast<std::size_t>(place->second)].Add(rank);
  }

  const std::size_t hosts = leaders_.size();
  run_end_.resize(hosts);
  for (std::size_t host = hosts; host-- > 0;) {
    run_end_[host] = static_cast<int>(host);
    if (host + 1 == hosts) continue;
    const auto& here = ranks_of_host_[host].ranges();
    const auto& next = ranks_of_host_[host + 1].ranges();
    if (here.size() == 1 && next.size() == 1 && here[0].last + 1 == next[0].first) {
      run_end_[host] = run_end_[host + 1];
    }
  }
}

RankRanges Tree::RanksOfHosts(std::int64_t first, std::int64_t last) const {
  std::vector<RankRange> pieces;
  for (std::int64_t host = first; host <= last;) {
    const auto& ranges = ranks_of_host_[static_cast<std::size_t>(host)].ranges();
    const std::int64_t run_end =
        std::min<std::int64_t>(last, run_end_[static_cast<std::size_t>(host)]);
    if (run_end > host) {
      pieces.push_back(
          {ranges[0].first, ranks_of_host_[static_cast<std::size_t>(run_end)].ranges()[0].last});
    } else {
      pieces.insert(pieces.end(), ranges.begin(), ranges.end());
    }
    host = run_end + 1;
  }
  // Each addition is an append in ascending order, whatever the number of pieces.
  std::sort(pieces.begin(), pieces.end(),
            [](const RankRange& a, const RankRange& b) { return a.first < b.first; });
  RankRanges result;
  for (const RankRange& piece : pieces) result.Add(RankRanges::Span(piece.first, piece.last));
  return result;
}

RankRanges Tree::SubtreeOf(int rank) const {
  const std::int64_t host = host_of_rank_[static_cast<std::size_t>(rank)];
  if (leaders_[static_cast<std::size_t>(host)] != rank) return RankRanges::Single(rank);

  const std::int64_t hosts = static_cast<std::int64_t>(leaders_.size());
  // A chain has as many levels as hosts, but all of them in a row.
  if (arity_ == 1) return RanksOfHosts(host, hosts - 1);
  // Each level of a heap's subtree is a row of neighbours: k*first+1 ... k*last+k is the next one.
  RankRanges result;
  std::int64_t first = host;
  std::int64_t last = host;
  while (first < hosts) {
    result.Add(RanksOfHosts(first, std::min(last, hosts - 1)));
    first = first * arity_ + 1;
    last = last * arity_ + arity_;
  }
  return result;
}

std::vector<int> Tree::ChildrenOf(int rank) const {
  const std::size_t host = static_cast<std::size_t>(host_of_rank_[static_cast<std::size_t>(rank)]);
  if (leaders_[host] != rank) return {};
  std::vector<int> children = ranks_of_host_[host].ToVector();
  children.erase(children.begin());  // the leader itself, its host's lowest
  const std::int64_t hosts = static_cast<std::int64_t>(leaders_.size());
  const std::int64_t first = static_cast<std::int64_t>(host) * arity_ + 1;
  for (std::int64_t child = first; child < std::min(hosts, first + arity_); ++child) {
    children.push_back(leaders_[static_cast<std::size_t>(child)]);
  }
  std::sort(children.begin(), children.end());
  return children;
}

Tree::Node Tree::NodeOf(int rank) const {
  SIRTAKI_CHECK(rank >= 0 && rank < size(), "a rank of the tree");
  Node node;
  const int host = host_of_rank_[static_cast<std::size_t>(rank)];
  const int leader = leaders_[static_cast<std::size_t>(host)];
  if (leader != rank) {
    node.parent = leader;
  } else if (host > 0) {
    node.parent = leaders_[static_cast<std::size_t>((host - 1) / arity_)];
  }
  node.children = ChildrenOf(rank);
  node.child_subtrees.reserve(node.children.size());
  for (int child : node.children) node.child_subtrees.push_back(SubtreeOf(child));
  node.subtree = SubtreeOf(rank);
  return node;
}

}  // namespace sirtaki::core
