#include "sirtaki/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::HasSubstr;

constexpr std::int64_t kBytes = 4000;

// The sums of a host, by name in the table.
std::int64_t Together(const MemoryPlan& plan, Shard shard, ShardOver over = ShardOver::All) {
  for (const MemoryPlan::Choice& choice : plan.choices) {
    if (choice.shard == shard && choice.shard_over == over) return choice.together();
  }
  return -1;
}

TEST(MemoryPlanTest, OneHost) {
  const MemoryPlan plan = memory_plan({kBytes, kBytes, 2 * kBytes}, 4, 4);
  ASSERT_EQ(plan.choices.size(), 3);
  EXPECT_EQ(Together(plan, Shard::None), 16 * kBytes);
  EXPECT_EQ(Together(plan, Shard::OptimizerState), (1 + 4 + 2) * kBytes);
  EXPECT_EQ(Together(plan, Shard::Gradients), (1 + 1 + 2) * kBytes);
  const MemoryPlan copies = memory_plan({kBytes, kBytes, 2 * kBytes}, 4, 4, false);
  EXPECT_EQ(Together(copies, Shard::OptimizerState), (4 + 4 + 2) * kBytes);
}

TEST(MemoryPlanTest, SeveralHosts) {
  const MemoryPlan plan = memory_plan({kBytes, kBytes, 2 * kBytes}, 4, 2);
  ASSERT_EQ(plan.choices.size(), 5);
  EXPECT_EQ(Together(plan, Shard::None), 8 * kBytes);
  EXPECT_EQ(Together(plan, Shard::OptimizerState), (2 + 2 + 1) * kBytes);
  EXPECT_EQ(Together(plan, Shard::Gradients), 2 * kBytes + kBytes / 2 + kBytes);
  EXPECT_EQ(plan.fully_sharded.parameters, kBytes / 2);
  EXPECT_EQ(plan.fully_sharded.gradients, kBytes / 2);
  EXPECT_EQ(plan.fully_sharded.state, kBytes);
  EXPECT_EQ(Together(plan, Shard::OptimizerState, ShardOver::Host), (1 + 2 + 2) * kBytes);
  EXPECT_EQ(Together(plan, Shard::Gradients, ShardOver::Host), (1 + 1 + 2) * kBytes);
}

TEST(MemoryPlanTest, OfOptimizersAndTheirState) {
  RunTorchRanks(4,
                [](int) {
                  const auto weight = torch::zeros({1000}, torch::requires_grad());
                  const auto frozen = torch::zeros({500});
                  const auto state_of = [](const torch::optim::Optimizer& optimizer) {
                    return memory_plan(optimizer).of_rank.state;
                  };
                  const std::vector<torch::Tensor> both = {weight, frozen};
                  using namespace torch::optim;
                  const MemoryPlan plan = memory_plan(Adam(both, AdamOptions(1)));
                  EXPECT_EQ(plan.ranks, 4);
                  EXPECT_EQ(plan.ranks_of_host, 2);
                  EXPECT_EQ(plan.of_rank.parameters, 6000);
                  EXPECT_EQ(plan.of_rank.gradients, 4000);
                  EXPECT_EQ(plan.of_rank.state, 8000);
                  EXPECT_GT(plan.in_use_now, 1 << 20);
                  EXPECT_EQ(state_of(AdamW(both, AdamWOptions(1).amsgrad(true))), 12000);
                  EXPECT_EQ(state_of(SGD(both, SGDOptions(1))), 0);
                  EXPECT_EQ(state_of(SGD(both, SGDOptions(1).momentum(0.5))), 4000);
                  EXPECT_EQ(state_of(RMSprop(both, RMSpropOptions(1).centered(true).momentum(0.5))),
                            12000);
                  EXPECT_EQ(state_of(Adagrad(both, AdagradOptions(1))), 4000);
                  EXPECT_THAT(plan.text(), HasSubstr("Gradients, over hosts"));
                },
                {}, {0, 0, 1, 1});
}

TEST(MemoryPlanTest, HostsHaveAsManyRanksEach) {
  for (const auto& [ranks, here] : {std::pair{3, 2}, {0, 0}, {2, 4}, {-4, -2}}) {
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [ranks = ranks, here = here] {
                          memory_plan({1, 1, 1}, ranks, here);
                        }),
                HasSubstr("as many on each"));
  }
}

}  // namespace
}  // namespace sirtaki::tests
