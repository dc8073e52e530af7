// The control plane at sizes that no test machine has.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <variant>

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
      for (const auto& request : requests) sim.node(r).Submit(request, sim.now());
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

// What a node keeps of keys that are decided is dropped now and then.
TEST(NegotiatorScaleTest, AKeyWaitsOnWhileThousandsAreUsedOnce) {
  SimOptions options;
  options.host_of_rank = {0, 1, 2};
  NegotiationSim sim(options);
  std::map<std::string, int> executed;
  sim.on_batch = [&](int, const core::DecidedBatch& batch) {
    for (const core::Decided& entry : batch.entries) {
      ++executed[std::get<core::DecidedRun>(entry).key.name.text()];
    }
  };
  const auto submit = [&sim](int rank, const std::string& name) {
    sim.node(rank).Submit(RequestOf(core::Key::Named(0, name), AllReduceOf({1})), sim.now());
  };
  for (const int rank : {0, 2}) submit(rank, "late");
  for (int i = 0; i < 5000; ++i) {
    for (int rank = 0; rank < 3; ++rank) submit(rank, std::to_string(i));
    if (i % 100 == 99) sim.Settle();
  }
  EXPECT_EQ(executed.count("late"), 0U);
  submit(1, "late");
  sim.Settle();
  EXPECT_EQ(executed.size(), 5001U);
  for (const auto& [name, times] : executed) EXPECT_EQ(times, 3) << name;
  for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(sim.node(rank).Quiescent()) << rank;
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
