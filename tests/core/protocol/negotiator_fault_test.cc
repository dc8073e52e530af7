#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/protocol/negotiator.h"

namespace sirtaki::core {
namespace {

TEST(NegotiatorFaultTest, OfTwoFaultsEveryRankEndsWithTheEarliest) {
  const Tree tree = Tree::Build({0, 0, 0}, 8);  // 1 and 2 are children of 0
  std::int64_t clock = 0;
  std::vector<std::unique_ptr<Negotiator>> nodes;
  for (int rank = 0; rank < 3; ++rank) {
    NegotiatorOptions options;
    options.rank = rank;
    options.sets[kWorldSet] = RankRanges::Span(0, 2);
    options.unix_us = [&clock] { return clock; };
    nodes.push_back(std::make_unique<Negotiator>(std::move(options), tree));
  }
  const auto node = [&](int rank) -> Negotiator& { return *nodes[static_cast<std::size_t>(rank)]; };
  clock = 1;
  node(1).RaiseFault(StatusCode::kAborted, "early", "");
  clock = 2;
  node(2).RaiseFault(StatusCode::kAborted, "late", "");
  // The later one is heard by the root first.
  for (const int rank : {2, 0, 1, 0, 2, 0, 1, 2}) {
    for (Outgoing& message : node(rank).TakeOutgoing()) {
      node(message.to).Receive(rank, std::move(message.body), {});
    }
  }
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(node(rank).cause().text, "early") << "rank " << rank;
    EXPECT_TRUE(node(rank).TakeOutgoing().empty()) << "rank " << rank << " goes on telling";
  }
}

}  // namespace
}  // namespace sirtaki::core
