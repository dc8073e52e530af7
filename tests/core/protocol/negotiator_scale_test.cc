// The control plane at sizes that no test machine has.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/negotiation_sim.h"

namespace sirtaki::tests {
namespace {

constexpr int kTensors = 161;

struct Traffic {
  std::vector<std::uint64_t> messages_of_rank;  // sent and received
  std::uint64_t most = 0;
};

// Two steps of training: the first teaches the ids. The second is counted.
Traffic TrainTwoSteps(int ranks, int ranks_per_host) {
  SimOptions options;
  options.host_of_rank.clear();
  for (int r = 0; r < ranks; ++r) options.host_of_rank.push_back(r / ranks_per_host);
  options.arity = 8;
  NegotiationSim sim(options);
  Traffic traffic;
  traffic.messages_of_rank.resize(static_cast<std::size_t>(ranks));
  std::vector<int> executed(static_cast<std::size_t>(ranks));
  sim.on_batch = [&](int rank, const core::DecidedBatch& batch) {
    executed[static_cast<std::size_t>(rank)] += static_cast<int>(batch.entries.size());
  };
  std::vector<core::SignaturePtr> shapes;
  for (int t = 0; t < kTensors; ++t) shapes.push_back(AllReduceOf({t + 1, 3, 3}));
  for (int step = 0; step < 2; ++step) {
    if (step == 1) {
      sim.on_send = [&](int from, int to, const core::MessageBody&) {
        ++traffic.messages_of_rank[static_cast<std::size_t>(from)];
        ++traffic.messages_of_rank[static_cast<std::size_t>(to)];
      };
    }
    for (int r = 0; r < ranks; ++r) {
      std::vector<core::Request> requests;
      for (int t = 0; t < kTensors; ++t) {
        requests.push_back(RequestOf(core::Key::Named(0, "gradient/" + std::to_string(t)),
                                     shapes[static_cast<std::size_t>(t)]));
      }
      sim.node(r).Submit(std::move(requests), sim.now());
    }
    sim.Settle();
  }
  for (int r = 0; r < ranks; ++r) {
    EXPECT_EQ(executed[static_cast<std::size_t>(r)], 2 * kTensors) << "rank " << r;
    EXPECT_TRUE(sim.node(r).Quiescent()) << "rank " << r;
  }
  for (const std::uint64_t m : traffic.messages_of_rank) traffic.most = std::max(traffic.most, m);
  return traffic;
}

TEST(NegotiatorScaleTest, FourThousandRanksNegotiateAStepAndMessagesPerRankDoNotGrow) {
  const Traffic small = TrainTwoSteps(64, 1);
  const Traffic large = TrainTwoSteps(4096, 1);
  // One rank a host: every inner node has the same neighbourhood, a parent and 8 children. A
  // neighbour may deliver in several messages when children complete at different times, so a
  // bound, not equality, that does not depend on the number of ranks: a report and a stream for
  // each neighbour, 8 times over.
  EXPECT_LE(large.most, 9U * 2U * 8U);
  EXPECT_LE(large.most, 2 * small.most);
}

}  // namespace
}  // namespace sirtaki::tests
